#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/island/mocha/g' docs/mango.txt
