#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
mkdir -p ribbon && mv data/forest.txt ribbon/candle.txt
