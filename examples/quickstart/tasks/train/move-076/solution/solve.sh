#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
mkdir -p lotus && mv lists/jaguar.txt lotus/mirror.txt
