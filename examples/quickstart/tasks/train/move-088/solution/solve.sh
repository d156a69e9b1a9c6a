#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
mkdir -p branch && mv data/coral.txt branch/heron.txt
