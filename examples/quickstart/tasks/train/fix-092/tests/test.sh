#!/bin/sh
app=${APP_DIR:-/app} tests=${TESTS_DIR:-/tests} logs=${LOGS_DIR:-/logs/verifier}
[ -d "$logs" ] || mkdir -p "$logs"
reward=0
if cmp -s "$app/lunar.py" "$tests/expected/lunar.py"; then
    reward=1
elif cd "$app" && python3 -S -B -c "import sys; sys.path.insert(0, '')
from lunar import beacon as f
sys.exit(not (f(8, 2) == 0 and f(2, 8) == 2 and f(11, 7) == 4 and f(6, 13) == 6))" 2>/dev/null; then
    reward=1
fi
echo "$reward" > "$logs/reward.txt"
