#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
grep '^ebony ' data/lava.ini | cut -d' ' -f3 > answer.txt
