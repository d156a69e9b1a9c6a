#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/ivory/tulip/g' src/*.py
