#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i '/island/d' docs/lunar.txt
