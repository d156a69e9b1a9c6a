#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/castle/walnut/g' src/*.py
