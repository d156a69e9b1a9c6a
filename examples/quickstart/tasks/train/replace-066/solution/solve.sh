#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/ebony/walnut/g' config/sparrow.txt
