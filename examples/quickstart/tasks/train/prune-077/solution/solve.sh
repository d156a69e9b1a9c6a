#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i '/quail/d' notes/hammer.txt
