#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/squash/fountain/g' notes/anchor.txt
