#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i '/quill/d' config/cello.txt
