#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
grep '^ocean ' data/jacket.ini | cut -d' ' -f3 > answer.txt
