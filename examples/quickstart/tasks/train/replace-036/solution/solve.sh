#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/scarlet/lantern/g' lists/leopard.txt
