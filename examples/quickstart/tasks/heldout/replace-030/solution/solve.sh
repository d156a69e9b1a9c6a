#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/camel/cotton/g' docs/sable.txt
