#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
mkdir -p silver && mv data/canoe.txt silver/kernel.txt
