#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i '/mango/d' config/leopard.txt
