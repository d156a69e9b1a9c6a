#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/pebble/easel/g' src/*.py
