#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
mkdir -p autumn && mv data/bamboo.txt autumn/heron.txt
