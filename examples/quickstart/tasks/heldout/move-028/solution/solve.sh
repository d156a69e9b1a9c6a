#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
mkdir -p easel && mv notes/fox.txt easel/lantern.txt
