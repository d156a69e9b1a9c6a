#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i '/mustard/d' docs/llama.txt
