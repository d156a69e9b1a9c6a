#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
grep '^jungle ' data/cobalt.ini | cut -d' ' -f3 > answer.txt
