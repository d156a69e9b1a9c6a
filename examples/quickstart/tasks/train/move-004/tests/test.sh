#!/bin/sh
app=${APP_DIR:-/app} tests=${TESTS_DIR:-/tests} logs=${LOGS_DIR:-/logs/verifier}
[ -d "$logs" ] || mkdir -p "$logs"
reward=0
if cmp -s "$app/dragon/blaze.txt" "$tests/expected/dragon/blaze.txt"; then
    [ -e "$app/lists/scarlet.txt" ] && reward=0.5 || reward=1
fi
echo "$reward" > "$logs/reward.txt"
