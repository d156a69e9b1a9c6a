#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i '/dragon/d' docs/aspen.txt
