#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/papaya/valley/g' notes/blaze.txt
