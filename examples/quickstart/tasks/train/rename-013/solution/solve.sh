#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/drum/walnut/g' src/*.py
