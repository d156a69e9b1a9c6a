#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i '/hazel/d' data/copper.txt
