#!/bin/sh
app=${APP_DIR:-/app} tests=${TESTS_DIR:-/tests} logs=${LOGS_DIR:-/logs/verifier}
[ -d "$logs" ] || mkdir -p "$logs"
cmp -s "$app/config/cactus.txt" "$tests/expected/config/cactus.txt" && reward=1 || reward=0
cmp -s "$app/config/cumin.txt" "$tests/expected/config/cumin.txt" || reward=$(echo "$reward" | awk '{ print $1 / 2 }')
echo "$reward" > "$logs/reward.txt"
