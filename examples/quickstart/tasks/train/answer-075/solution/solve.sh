#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
grep '^oasis ' data/jacket.ini | cut -d' ' -f3 > answer.txt
