#!/bin/sh
app=${APP_DIR:-/app} tests=${TESTS_DIR:-/tests} logs=${LOGS_DIR:-/logs/verifier}
[ -d "$logs" ] || mkdir -p "$logs"
reward=0
if cmp -s "$app/agate/lemon.txt" "$tests/expected/agate/lemon.txt"; then
    [ -e "$app/config/adobe.txt" ] && reward=0.5 || reward=1
fi
echo "$reward" > "$logs/reward.txt"
