#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i '/candle/d' docs/harvest.txt
