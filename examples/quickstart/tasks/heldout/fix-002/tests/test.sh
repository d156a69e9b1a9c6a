#!/bin/sh
app=${APP_DIR:-/app} tests=${TESTS_DIR:-/tests} logs=${LOGS_DIR:-/logs/verifier}
[ -d "$logs" ] || mkdir -p "$logs"
reward=0
if cmp -s "$app/eagle.py" "$tests/expected/eagle.py"; then
    reward=1
elif cd "$app" && python3 -S -B -c "import sys; sys.path.insert(0, '')
from eagle import bishop as f
sys.exit(not (f(5, 2) == 3 and f(2, 5) == -3 and f(11, 7) == 4 and f(6, 13) == -7))" 2>/dev/null; then
    reward=1
fi
echo "$reward" > "$logs/reward.txt"
