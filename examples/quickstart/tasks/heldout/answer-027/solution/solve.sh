#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
grep '^lantern ' data/candle.ini | cut -d' ' -f3 > answer.txt
