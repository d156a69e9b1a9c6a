#!/bin/sh
app=${APP_DIR:-/app} tests=${TESTS_DIR:-/tests} logs=${LOGS_DIR:-/logs/verifier}
[ -d "$logs" ] || mkdir -p "$logs"
reward=0
if cmp -s "$app/plaza.py" "$tests/expected/plaza.py"; then
    reward=1
elif cd "$app" && python3 -S -B -c "import sys; sys.path.insert(0, '')
from plaza import clover as f
sys.exit(not (f(9, 3) == 12 and f(3, 9) == 12 and f(11, 7) == 18 and f(6, 13) == 19))" 2>/dev/null; then
    reward=1
fi
echo "$reward" > "$logs/reward.txt"
