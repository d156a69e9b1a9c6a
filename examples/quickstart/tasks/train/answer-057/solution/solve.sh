#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
grep '^thunder ' config/cedar.ini | cut -d' ' -f3 > answer.txt
