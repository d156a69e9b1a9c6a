#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
grep '^osprey ' lists/thunder.ini | cut -d' ' -f3 > answer.txt
