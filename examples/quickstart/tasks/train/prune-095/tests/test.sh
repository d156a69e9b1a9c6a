#!/bin/sh
app=${APP_DIR:-/app} tests=${TESTS_DIR:-/tests} logs=${LOGS_DIR:-/logs/verifier}
[ -d "$logs" ] || mkdir -p "$logs"
cmp -s "$app/docs/llama.txt" "$tests/expected/docs/llama.txt" && reward=1 || reward=0
cmp -s "$app/docs/lunar.txt" "$tests/expected/docs/lunar.txt" || reward=$(echo "$reward" | awk '{ print $1 / 2 }')
echo "$reward" > "$logs/reward.txt"
