#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
mkdir -p shadow && mv config/kernel.txt shadow/wren.txt
