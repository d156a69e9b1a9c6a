#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/opal/flora/g' data/cricket.txt
