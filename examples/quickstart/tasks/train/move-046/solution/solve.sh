#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
mkdir -p wren && mv notes/fountain.txt wren/fossil.txt
