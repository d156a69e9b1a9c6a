#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i '/quartz/d' notes/walnut.txt
