#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/pigeon/zenith/g' src/*.py
