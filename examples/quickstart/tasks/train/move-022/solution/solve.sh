#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
mkdir -p scarlet && mv data/cello.txt scarlet/tavern.txt
