#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i '/mocha/d' lists/zenith.txt
