#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/cactus/quill/g' docs/brook.txt
