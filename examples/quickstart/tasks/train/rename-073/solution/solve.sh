#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/autumn/mulberry/g' src/*.py
