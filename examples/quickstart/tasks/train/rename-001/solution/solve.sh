#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/lapis/jungle/g' src/*.py
