#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
grep '^cotton ' data/timber.ini | cut -d' ' -f3 > answer.txt
