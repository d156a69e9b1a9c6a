#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/laurel/oasis/g' src/*.py
