#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/garlic/zinc/g' src/*.py
