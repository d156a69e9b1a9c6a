#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
grep '^hazel ' config/wren.ini | cut -d' ' -f3 > answer.txt
