#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i '/chalk/d' notes/kiwi.txt
