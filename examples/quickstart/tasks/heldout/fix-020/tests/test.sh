#!/bin/sh
app=${APP_DIR:-/app} tests=${TESTS_DIR:-/tests} logs=${LOGS_DIR:-/logs/verifier}
[ -d "$logs" ] || mkdir -p "$logs"
reward=0
if cmp -s "$app/donkey.py" "$tests/expected/donkey.py"; then
    reward=1
elif cd "$app" && python3 -S -B -c "import sys; sys.path.insert(0, '')
from donkey import falcon as f
sys.exit(not (f(8, 4) == 4 and f(4, 8) == -4 and f(11, 7) == 4 and f(6, 13) == -7))" 2>/dev/null; then
    reward=1
fi
echo "$reward" > "$logs/reward.txt"
