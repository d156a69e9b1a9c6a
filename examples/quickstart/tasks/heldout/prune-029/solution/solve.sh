#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i '/crystal/d' notes/magnet.txt
