#!/bin/sh
app=${APP_DIR:-/app} tests=${TESTS_DIR:-/tests} logs=${LOGS_DIR:-/logs/verifier}
[ -d "$logs" ] || mkdir -p "$logs"
reward=0
if cmp -s "$app/branch.py" "$tests/expected/branch.py"; then
    reward=1
elif cd "$app" && python3 -S -B -c "import sys; sys.path.insert(0, '')
from branch import garlic as f
sys.exit(not (f(6, 2) == 6 and f(2, 6) == 6 and f(11, 7) == 11 and f(6, 13) == 13))" 2>/dev/null; then
    reward=1
fi
echo "$reward" > "$logs/reward.txt"
