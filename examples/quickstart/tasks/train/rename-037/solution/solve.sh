#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/lemon/boulder/g' src/*.py
