#!/bin/sh
app=${APP_DIR:-/app} tests=${TESTS_DIR:-/tests} logs=${LOGS_DIR:-/logs/verifier}
[ -d "$logs" ] || mkdir -p "$logs"
cmp -s "$app/config/leopard.txt" "$tests/expected/config/leopard.txt" && reward=1 || reward=0
cmp -s "$app/config/harvest.txt" "$tests/expected/config/harvest.txt" || reward=$(echo "$reward" | awk '{ print $1 / 2 }')
echo "$reward" > "$logs/reward.txt"
