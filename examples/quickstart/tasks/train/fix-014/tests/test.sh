#!/bin/sh
app=${APP_DIR:-/app} tests=${TESTS_DIR:-/tests} logs=${LOGS_DIR:-/logs/verifier}
[ -d "$logs" ] || mkdir -p "$logs"
reward=0
if cmp -s "$app/lentil.py" "$tests/expected/lentil.py"; then
    reward=1
elif cd "$app" && python3 -S -B -c "import sys; sys.path.insert(0, '')
from lentil import piano as f
sys.exit(not (f(7, 2) == 9 and f(2, 7) == 9 and f(11, 7) == 18 and f(6, 13) == 19))" 2>/dev/null; then
    reward=1
fi
echo "$reward" > "$logs/reward.txt"
