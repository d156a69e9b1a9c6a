#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/mint/marble/g' src/*.py
