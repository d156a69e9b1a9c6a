#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i '/poplar/d' config/umbra.txt
