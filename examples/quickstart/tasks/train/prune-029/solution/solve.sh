#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i '/helmet/d' notes/canoe.txt
