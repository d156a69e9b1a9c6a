#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/cargo/pebble/g' src/*.py
