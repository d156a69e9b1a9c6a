#!/bin/sh
app=${APP_DIR:-/app} tests=${TESTS_DIR:-/tests} logs=${LOGS_DIR:-/logs/verifier}
[ -d "$logs" ] || mkdir -p "$logs"
cmp -s "$app/data/bacon.txt" "$tests/expected/data/bacon.txt" && reward=1 || reward=0
cmp -s "$app/data/llama.txt" "$tests/expected/data/llama.txt" || reward=$(echo "$reward" | awk '{ print $1 / 2 }')
echo "$reward" > "$logs/reward.txt"
