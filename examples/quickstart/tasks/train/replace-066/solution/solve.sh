#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/ebony/velvet/g' config/silver.txt
