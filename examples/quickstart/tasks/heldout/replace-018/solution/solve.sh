#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/mirror/pebble/g' notes/brass.txt
