#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/bacon/branch/g' config/apron.txt
