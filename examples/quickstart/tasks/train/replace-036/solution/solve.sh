#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/granite/jersey/g' notes/sapphire.txt
