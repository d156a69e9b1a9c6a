#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/glacier/chalk/g' src/*.py
