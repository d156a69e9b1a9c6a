#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/otter/kiwi/g' data/jersey.txt
