#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/crater/oasis/g' src/*.py
