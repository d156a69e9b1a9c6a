#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
mkdir -p orchid && mv notes/bronze.txt orchid/iris.txt
