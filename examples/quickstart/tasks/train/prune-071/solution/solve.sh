#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i '/bamboo/d' docs/petal.txt
