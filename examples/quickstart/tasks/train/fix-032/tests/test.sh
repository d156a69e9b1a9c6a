#!/bin/sh
app=${APP_DIR:-/app} tests=${TESTS_DIR:-/tests} logs=${LOGS_DIR:-/logs/verifier}
[ -d "$logs" ] || mkdir -p "$logs"
reward=0
if cmp -s "$app/carrot.py" "$tests/expected/carrot.py"; then
    reward=1
elif cd "$app" && python3 -S -B -c "import sys; sys.path.insert(0, '')
from carrot import kettle as f
sys.exit(not (f(5, 4) == 5 and f(4, 5) == 5 and f(11, 7) == 11 and f(6, 13) == 13))" 2>/dev/null; then
    reward=1
fi
echo "$reward" > "$logs/reward.txt"
