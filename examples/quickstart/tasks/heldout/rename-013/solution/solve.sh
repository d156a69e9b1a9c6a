#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/quail/plum/g' src/*.py
