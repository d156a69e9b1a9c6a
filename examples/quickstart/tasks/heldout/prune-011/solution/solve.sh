#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i '/zenith/d' data/bacon.txt
