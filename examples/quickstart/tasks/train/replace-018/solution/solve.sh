#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/spruce/salmon/g' config/lilac.txt
