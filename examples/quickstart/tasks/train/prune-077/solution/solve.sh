#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i '/python/d' notes/hammer.txt
