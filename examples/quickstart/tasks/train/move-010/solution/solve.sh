#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
mkdir -p falcon && mv config/ivory.txt falcon/barley.txt
