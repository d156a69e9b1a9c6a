#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
grep '^citrus ' docs/linen.ini | cut -d' ' -f3 > answer.txt
