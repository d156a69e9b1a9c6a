#!/bin/sh
app=${APP_DIR:-/app} tests=${TESTS_DIR:-/tests} logs=${LOGS_DIR:-/logs/verifier}
[ -d "$logs" ] || mkdir -p "$logs"
cmp -s "$app/docs/atlas.txt" "$tests/expected/docs/atlas.txt" && reward=1 || reward=0
cmp -s "$app/docs/lizard.txt" "$tests/expected/docs/lizard.txt" || reward=$(echo "$reward" | awk '{ print $1 / 2 }')
echo "$reward" > "$logs/reward.txt"
