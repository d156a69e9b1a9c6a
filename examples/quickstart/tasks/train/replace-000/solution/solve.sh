#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/dapper/iguana/g' data/carrot.txt
