#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/lemon/quartz/g' notes/cider.txt
