#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
mkdir -p leopard && mv config/tundra.txt leopard/saddle.txt
