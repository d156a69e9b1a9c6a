#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
grep '^acorn ' config/plaza.ini | cut -d' ' -f3 > answer.txt
