#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/pebble/tulip/g' notes/eclipse.txt
