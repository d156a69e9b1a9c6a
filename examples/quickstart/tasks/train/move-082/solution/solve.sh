#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
mkdir -p leopard && mv config/turtle.txt leopard/saffron.txt
