#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/lantern/topaz/g' src/*.py
