#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
grep '^flint ' docs/nebula.ini | cut -d' ' -f3 > answer.txt
