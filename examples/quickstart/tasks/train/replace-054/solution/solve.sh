#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/lemon/quill/g' notes/cider.txt
