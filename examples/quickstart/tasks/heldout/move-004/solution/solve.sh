#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
mkdir -p ferry && mv notes/river.txt ferry/falcon.txt
