#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/yarrow/prairie/g' src/*.py
