#!/bin/sh
app=${APP_DIR:-/app} tests=${TESTS_DIR:-/tests} logs=${LOGS_DIR:-/logs/verifier}
[ -d "$logs" ] || mkdir -p "$logs"
reward=0
if cmp -s "$app/kiwi.py" "$tests/expected/kiwi.py"; then
    reward=1
elif cd "$app" && python3 -S -B -c "import sys; sys.path.insert(0, '')
from kiwi import walnut as f
sys.exit(not (f(9, 2) == 2 and f(2, 9) == 2 and f(11, 7) == 7 and f(6, 13) == 6))" 2>/dev/null; then
    reward=1
fi
echo "$reward" > "$logs/reward.txt"
