#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i '/nebula/d' docs/llama.txt
