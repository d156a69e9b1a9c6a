#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
grep '^mocha ' docs/olive.ini | cut -d' ' -f3 > answer.txt
