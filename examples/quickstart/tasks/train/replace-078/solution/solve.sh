#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/ocean/fountain/g' docs/carrot.txt
