#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/lantern/fable/g' notes/atlas.txt
