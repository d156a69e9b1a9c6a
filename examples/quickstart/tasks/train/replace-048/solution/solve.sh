#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/desert/garlic/g' data/kernel.txt
