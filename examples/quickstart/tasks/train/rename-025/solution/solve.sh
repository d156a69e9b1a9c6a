#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/attic/fable/g' src/*.py
