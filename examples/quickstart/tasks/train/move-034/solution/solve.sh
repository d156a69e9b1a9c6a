#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
mkdir -p bamboo && mv data/cactus.txt bamboo/beetle.txt
