#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
grep '^iguana ' config/butter.ini | cut -d' ' -f3 > answer.txt
