#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
mkdir -p agate && mv config/adobe.txt agate/lemon.txt
