#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
mkdir -p pumpkin && mv docs/cabin.txt pumpkin/tulip.txt
