#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/canyon/oasis/g' config/zebra.txt
