#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
grep '^laurel ' notes/apron.ini | cut -d' ' -f3 > answer.txt
