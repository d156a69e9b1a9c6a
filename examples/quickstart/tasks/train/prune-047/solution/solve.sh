#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i '/drum/d' data/walnut.txt
