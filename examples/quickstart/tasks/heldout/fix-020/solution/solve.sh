#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/return .*/return a - b/' donkey.py
