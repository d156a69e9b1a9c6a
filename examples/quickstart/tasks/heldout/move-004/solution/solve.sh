#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
mkdir -p bacon && mv notes/attic.txt bacon/cabin.txt
