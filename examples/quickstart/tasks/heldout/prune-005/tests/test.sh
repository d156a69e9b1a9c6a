#!/bin/sh
app=${APP_DIR:-/app} tests=${TESTS_DIR:-/tests} logs=${LOGS_DIR:-/logs/verifier}
[ -d "$logs" ] || mkdir -p "$logs"
cmp -s "$app/lists/walnut.txt" "$tests/expected/lists/walnut.txt" && reward=1 || reward=0
cmp -s "$app/lists/ember.txt" "$tests/expected/lists/ember.txt" || reward=$(echo "$reward" | awk '{ print $1 / 2 }')
echo "$reward" > "$logs/reward.txt"
