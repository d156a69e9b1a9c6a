#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/rocket/rubble/g' src/*.py
