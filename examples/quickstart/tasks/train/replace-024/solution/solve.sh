#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/zenith/gravel/g' config/river.txt
