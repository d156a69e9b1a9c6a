#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
grep '^jigsaw ' lists/bugle.ini | cut -d' ' -f3 > answer.txt
