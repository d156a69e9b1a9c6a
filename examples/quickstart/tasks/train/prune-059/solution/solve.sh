#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i '/sapphire/d' docs/atlas.txt
