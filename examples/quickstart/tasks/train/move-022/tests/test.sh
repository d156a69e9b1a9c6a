#!/bin/sh
app=${APP_DIR:-/app} tests=${TESTS_DIR:-/tests} logs=${LOGS_DIR:-/logs/verifier}
[ -d "$logs" ] || mkdir -p "$logs"
reward=0
if cmp -s "$app/honey/granite.txt" "$tests/expected/honey/granite.txt"; then
    [ -e "$app/notes/boulder.txt" ] && reward=0.5 || reward=1
fi
echo "$reward" > "$logs/reward.txt"
