#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
mkdir -p teapot && mv lists/lotus.txt teapot/canyon.txt
