#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
grep '^radish ' data/oyster.ini | cut -d' ' -f3 > answer.txt
