#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/agate/citrus/g' src/*.py
