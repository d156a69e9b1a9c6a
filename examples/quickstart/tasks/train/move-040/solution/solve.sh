#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
mkdir -p cabin && mv notes/lobster.txt cabin/dingo.txt
