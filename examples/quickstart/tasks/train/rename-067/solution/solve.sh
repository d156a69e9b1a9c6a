#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/canoe/linen/g' src/*.py
