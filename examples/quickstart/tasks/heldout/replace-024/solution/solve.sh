#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/raven/gopher/g' config/papaya.txt
