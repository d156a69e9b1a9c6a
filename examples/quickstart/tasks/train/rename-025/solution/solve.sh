#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/meadow/dune/g' src/*.py
