#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/pelican/sunset/g' notes/elbow.txt
