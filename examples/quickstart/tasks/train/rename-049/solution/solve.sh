#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/cargo/parrot/g' src/*.py
