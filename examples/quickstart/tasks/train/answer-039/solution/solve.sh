#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
grep '^copper ' docs/elbow.ini | cut -d' ' -f3 > answer.txt
