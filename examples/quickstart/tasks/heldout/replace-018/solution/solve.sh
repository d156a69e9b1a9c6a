#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/carrot/python/g' lists/fox.txt
