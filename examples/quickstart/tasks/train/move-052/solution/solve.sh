#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
mkdir -p jaguar && mv data/feather.txt jaguar/papaya.txt
