#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/breeze/vanilla/g' docs/kettle.txt
