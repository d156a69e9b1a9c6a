#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
grep '^timber ' config/cedar.ini | cut -d' ' -f3 > answer.txt
