#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i '/button/d' data/nickel.txt
