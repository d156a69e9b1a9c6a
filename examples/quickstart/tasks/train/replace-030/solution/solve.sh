#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
sed -i 's/monsoon/beetle/g' notes/cypress.txt
