#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/pelican/easel/g' src/*.py
