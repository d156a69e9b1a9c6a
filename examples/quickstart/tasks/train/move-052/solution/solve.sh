#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
mkdir -p paddle && mv docs/parrot.txt paddle/jaguar.txt
