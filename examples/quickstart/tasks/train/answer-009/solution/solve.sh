#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
grep '^silver ' data/cabin.ini | cut -d' ' -f3 > answer.txt
