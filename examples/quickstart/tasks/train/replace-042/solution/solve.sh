#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/elbow/winter/g' notes/olive.txt
