#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
mkdir -p harvest && mv lists/clover.txt harvest/bugle.txt
