#!/bin/sh
app=${APP_DIR:-/app} tests=${TESTS_DIR:-/tests} logs=${LOGS_DIR:-/logs/verifier}
[ -d "$logs" ] || mkdir -p "$logs"
reward=0
if cmp -s "$app/dapper.py" "$tests/expected/dapper.py"; then
    reward=1
elif cd "$app" && python3 -S -B -c "import sys; sys.path.insert(0, '')
from dapper import iguana as f
sys.exit(not (f(9, 3) == 27 and f(3, 9) == 27 and f(11, 7) == 77 and f(6, 13) == 78))" 2>/dev/null; then
    reward=1
fi
echo "$reward" > "$logs/reward.txt"
