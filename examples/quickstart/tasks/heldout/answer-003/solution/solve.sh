#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
grep '^boulder ' config/eagle.ini | cut -d' ' -f3 > answer.txt
