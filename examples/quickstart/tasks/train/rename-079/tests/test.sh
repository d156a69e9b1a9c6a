#!/bin/sh
app=${APP_DIR:-/app} tests=${TESTS_DIR:-/tests} logs=${LOGS_DIR:-/logs/verifier}
[ -d "$logs" ] || mkdir -p "$logs"
right=0
for f in src/cypress.py src/dapper.py src/rubble.py; do
    cmp -s "$app/$f" "$tests/expected/$f" && right=$((right + 1))
done
case $right in 3) reward=1 ;; 2) reward=0.6667 ;; 1) reward=0.3333 ;; *) reward=0 ;; esac
echo "$reward" > "$logs/reward.txt"
