#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i '/lemon/d' config/mango.txt
