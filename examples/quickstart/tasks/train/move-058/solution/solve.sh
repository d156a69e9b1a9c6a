#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
mkdir -p jungle && mv notes/lobster.txt jungle/mocha.txt
