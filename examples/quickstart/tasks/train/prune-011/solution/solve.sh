#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i '/llama/d' config/cactus.txt
