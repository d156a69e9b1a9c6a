#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
grep '^kayak ' docs/ferry.ini | cut -d' ' -f3 > answer.txt
