#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
grep '^citrus ' notes/kernel.ini | cut -d' ' -f3 > answer.txt
