#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/sequoia/lemon/g' src/*.py
