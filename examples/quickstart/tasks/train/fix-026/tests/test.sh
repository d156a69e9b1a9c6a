#!/bin/sh
app=${APP_DIR:-/app} tests=${TESTS_DIR:-/tests} logs=${LOGS_DIR:-/logs/verifier}
[ -d "$logs" ] || mkdir -p "$logs"
reward=0
if cmp -s "$app/castle.py" "$tests/expected/castle.py"; then
    reward=1
elif cd "$app" && python3 -S -B -c "import sys; sys.path.insert(0, '')
from castle import lynx as f
sys.exit(not (f(9, 3) == 6 and f(3, 9) == -6 and f(11, 7) == 4 and f(6, 13) == -7))" 2>/dev/null; then
    reward=1
fi
echo "$reward" > "$logs/reward.txt"
