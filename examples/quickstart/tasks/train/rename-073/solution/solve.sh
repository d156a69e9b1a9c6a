#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/autumn/mustard/g' src/*.py
