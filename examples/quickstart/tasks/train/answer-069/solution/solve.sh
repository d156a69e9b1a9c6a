#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
grep '^amber ' lists/jaguar.ini | cut -d' ' -f3 > answer.txt
