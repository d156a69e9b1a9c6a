#!/bin/sh
app=${APP_DIR:-/app} tests=${TESTS_DIR:-/tests} logs=${LOGS_DIR:-/logs/verifier}
[ -d "$logs" ] || mkdir -p "$logs"
reward=0
if cmp -s "$app/leopard/saddle.txt" "$tests/expected/leopard/saddle.txt"; then
    [ -e "$app/config/tundra.txt" ] && reward=0.5 || reward=1
fi
echo "$reward" > "$logs/reward.txt"
