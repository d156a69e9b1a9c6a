#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
grep '^ebony ' notes/amber.ini | cut -d' ' -f3 > answer.txt
