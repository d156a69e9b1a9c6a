#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i '/spruce/d' data/lunar.txt
