#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i '/desert/d' notes/autumn.txt
