#!/bin/sh
cd "${APP_DIR:-/app}" || exit 1
mkdir -p barley && mv docs/cobra.txt barley/ivory.txt
