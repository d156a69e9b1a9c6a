#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/garlic/orchid/g' src/*.py
