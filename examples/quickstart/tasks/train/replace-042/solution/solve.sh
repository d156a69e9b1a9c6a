#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/elbow/walrus/g' notes/octopus.txt
