#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
mkdir -p sequoia && mv config/kernel.txt sequoia/willow.txt
