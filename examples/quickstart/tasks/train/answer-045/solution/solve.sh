#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
grep '^fossil ' notes/blaze.ini | cut -d' ' -f3 > answer.txt
