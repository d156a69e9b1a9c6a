#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/cabin/delta/g' src/*.py
