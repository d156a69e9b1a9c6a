#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
mkdir -p zebra && mv lists/cougar.txt zebra/camel.txt
