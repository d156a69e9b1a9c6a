#!/bin/sh
app=${APP_DIR:-/app} tests=${TESTS_DIR:-/tests} logs=${LOGS_DIR:-/logs/verifier}
[ -d "$logs" ] || mkdir -p "$logs"
reward=0
if cmp -s "$app/wren/fossil.txt" "$tests/expected/wren/fossil.txt"; then
    [ -e "$app/notes/fountain.txt" ] && reward=0.5 || reward=1
fi
echo "$reward" > "$logs/reward.txt"
