#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
grep '^zinc ' config/badge.ini | cut -d' ' -f3 > answer.txt
