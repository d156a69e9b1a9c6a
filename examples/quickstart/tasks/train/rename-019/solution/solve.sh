#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/sequoia/turtle/g' src/*.py
