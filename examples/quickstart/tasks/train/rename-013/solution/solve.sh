#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/drum/willow/g' src/*.py
