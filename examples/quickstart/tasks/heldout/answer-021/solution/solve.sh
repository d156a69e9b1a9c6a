#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
grep '^pigeon ' notes/stone.ini | cut -d' ' -f3 > answer.txt
