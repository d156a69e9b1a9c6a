#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i '/cobra/d' docs/bison.txt
