#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/leopard/cherry/g' notes/lobster.txt
