#!/bin/sh
app=${APP_DIR:-/app} tests=${TESTS_DIR:-/tests} logs=${LOGS_DIR:-/logs/verifier}
[ -d "$logs" ] || mkdir -p "$logs"
cmp -s "$app/notes/autumn.txt" "$tests/expected/notes/autumn.txt" && reward=1 || reward=0
cmp -s "$app/notes/cougar.txt" "$tests/expected/notes/cougar.txt" || reward=$(echo "$reward" | awk '{ print $1 / 2 }')
echo "$reward" > "$logs/reward.txt"
