#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
grep '^hazel ' config/zebra.ini | cut -d' ' -f3 > answer.txt
