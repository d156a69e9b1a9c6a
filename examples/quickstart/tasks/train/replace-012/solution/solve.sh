#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/canyon/nutmeg/g' config/wren.txt
