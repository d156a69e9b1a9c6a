#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
mkdir -p locust && mv config/drum.txt locust/squash.txt
