#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
grep '^zebra ' data/geyser.ini | cut -d' ' -f3 > answer.txt
