#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/jasper/fox/g' src/*.py
