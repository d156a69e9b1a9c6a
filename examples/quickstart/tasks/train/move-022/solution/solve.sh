#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
mkdir -p honey && mv notes/boulder.txt honey/granite.txt
