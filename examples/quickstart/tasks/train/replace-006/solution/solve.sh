#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/pebble/sequoia/g' data/cargo.txt
