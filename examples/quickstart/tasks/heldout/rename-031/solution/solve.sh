#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/paddle/basil/g' src/*.py
