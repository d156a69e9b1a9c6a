#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/nutmeg/blaze/g' src/*.py
