#!/bin/sh
app=${APP_DIR:-/app} tests=${TESTS_DIR:-/tests} logs=${LOGS_DIR:-/logs/verifier}
[ -d "$logs" ] || mkdir -p "$logs"
reward=0
if cmp -s "$app/paddle/jaguar.txt" "$tests/expected/paddle/jaguar.txt"; then
    [ -e "$app/docs/parrot.txt" ] && reward=0.5 || reward=1
fi
echo "$reward" > "$logs/reward.txt"
