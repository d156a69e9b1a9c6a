#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
grep '^gazelle ' docs/lynx.ini | cut -d' ' -f3 > answer.txt
