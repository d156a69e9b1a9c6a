#!/bin/sh
app=${APP_DIR:-/app} tests=${TESTS_DIR:-/tests} logs=${LOGS_DIR:-/logs/verifier}
[ -d "$logs" ] || mkdir -p "$logs"
cmp -s "$app/notes/kiwi.txt" "$tests/expected/notes/kiwi.txt" && reward=1 || reward=0
cmp -s "$app/notes/nectar.txt" "$tests/expected/notes/nectar.txt" || reward=$(echo "$reward" | awk '{ print $1 / 2 }')
echo "$reward" > "$logs/reward.txt"
