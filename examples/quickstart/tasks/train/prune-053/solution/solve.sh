#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i '/mirror/d' lists/nickel.txt
