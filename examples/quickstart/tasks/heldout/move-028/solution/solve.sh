#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
mkdir -p bison && mv config/blaze.txt bison/button.txt
