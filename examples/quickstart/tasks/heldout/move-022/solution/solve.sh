#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
mkdir -p ivory && mv data/oasis.txt ivory/button.txt
