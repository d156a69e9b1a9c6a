#!/bin/sh
app=${APP_DIR:-/app} tests=${TESTS_DIR:-/tests} logs=${LOGS_DIR:-/logs/verifier}
[ -d "$logs" ] || mkdir -p "$logs"
cmp -s "$app/config/cello.txt" "$tests/expected/config/cello.txt" && reward=1 || reward=0
cmp -s "$app/config/ember.txt" "$tests/expected/config/ember.txt" || reward=$(echo "$reward" | awk '{ print $1 / 2 }')
echo "$reward" > "$logs/reward.txt"
