#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/galaxy/harvest/g' src/*.py
