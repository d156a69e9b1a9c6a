#!/bin/sh
app=${APP_DIR:-/app} tests=${TESTS_DIR:-/tests} logs=${LOGS_DIR:-/logs/verifier}
[ -d "$logs" ] || mkdir -p "$logs"
reward=0
if cmp -s "$app/autumn/heron.txt" "$tests/expected/autumn/heron.txt"; then
    [ -e "$app/data/bamboo.txt" ] && reward=0.5 || reward=1
fi
echo "$reward" > "$logs/reward.txt"
