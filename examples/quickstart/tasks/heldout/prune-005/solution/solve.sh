#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i '/cherry/d' docs/honey.txt
