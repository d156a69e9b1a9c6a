#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
mkdir -p dragon && mv lists/scarlet.txt dragon/blaze.txt
