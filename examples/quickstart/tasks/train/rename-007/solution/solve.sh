#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/cricket/lagoon/g' src/*.py
