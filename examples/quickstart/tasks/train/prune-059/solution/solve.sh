#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i '/sandal/d' docs/atlas.txt
