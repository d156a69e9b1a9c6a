#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
mkdir -p dragon && mv data/jersey.txt dragon/guitar.txt
