#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/octopus/fountain/g' docs/carrot.txt
