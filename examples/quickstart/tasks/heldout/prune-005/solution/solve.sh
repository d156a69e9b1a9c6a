#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i '/iguana/d' lists/walnut.txt
