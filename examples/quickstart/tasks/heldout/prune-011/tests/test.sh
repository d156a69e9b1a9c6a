#!/bin/sh
app=${APP_DIR:-/app} tests=${TESTS_DIR:-/tests} logs=${LOGS_DIR:-/logs/verifier}
[ -d "$logs" ] || mkdir -p "$logs"
cmp -s "$app/config/umbra.txt" "$tests/expected/config/umbra.txt" && reward=1 || reward=0
cmp -s "$app/config/orchid.txt" "$tests/expected/config/orchid.txt" || reward=$(echo "$reward" | awk '{ print $1 / 2 }')
echo "$reward" > "$logs/reward.txt"
