#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/brook/pebble/g' config/jacket.txt
