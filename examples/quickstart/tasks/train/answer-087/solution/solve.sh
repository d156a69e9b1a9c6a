#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
grep '^raven ' data/paddle.ini | cut -d' ' -f3 > answer.txt
