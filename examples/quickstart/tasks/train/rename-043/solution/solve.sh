#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/laurel/ocean/g' src/*.py
