#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
grep '^oyster ' lists/squash.ini | cut -d' ' -f3 > answer.txt
