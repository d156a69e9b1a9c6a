#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/breeze/umbra/g' docs/kettle.txt
