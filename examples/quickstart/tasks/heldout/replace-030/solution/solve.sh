#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/cello/turtle/g' lists/dingo.txt
