#!/bin/sh
app=${APP_DIR:-/app} tests=${TESTS_DIR:-/tests} logs=${LOGS_DIR:-/logs/verifier}
[ -d "$logs" ] || mkdir -p "$logs"
cmp -s "$app/docs/honey.txt" "$tests/expected/docs/honey.txt" && reward=1 || reward=0
cmp -s "$app/docs/kiwi.txt" "$tests/expected/docs/kiwi.txt" || reward=$(echo "$reward" | awk '{ print $1 / 2 }')
echo "$reward" > "$logs/reward.txt"
