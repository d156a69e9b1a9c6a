#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
grep '^dragon ' config/badge.ini | cut -d' ' -f3 > answer.txt
