#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
grep '^plaza ' lists/flint.ini | cut -d' ' -f3 > answer.txt
