#!/bin/sh
app=${APP_DIR:-/app} tests=${TESTS_DIR:-/tests} logs=${LOGS_DIR:-/logs/verifier}
[ -d "$logs" ] || mkdir -p "$logs"
reward=0
if cmp -s "$app/sandal.py" "$tests/expected/sandal.py"; then
    reward=1
elif cd "$app" && python3 -S -B -c "import sys; sys.path.insert(0, '')
from sandal import butter as f
sys.exit(not (f(5, 3) == 3 and f(3, 5) == 3 and f(11, 7) == 7 and f(6, 13) == 6))" 2>/dev/null; then
    reward=1
fi
echo "$reward" > "$logs/reward.txt"
