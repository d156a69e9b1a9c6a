#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
mkdir -p bacon && mv config/breeze.txt bacon/adobe.txt
