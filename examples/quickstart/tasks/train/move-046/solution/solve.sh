#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
mkdir -p willow && mv notes/fountain.txt willow/fossil.txt
