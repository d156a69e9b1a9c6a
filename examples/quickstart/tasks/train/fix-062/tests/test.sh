#!/bin/sh
app=${APP_DIR:-/app} tests=${TESTS_DIR:-/tests} logs=${LOGS_DIR:-/logs/verifier}
[ -d "$logs" ] || mkdir -p "$logs"
reward=0
if cmp -s "$app/dolphin.py" "$tests/expected/dolphin.py"; then
    reward=1
elif cd "$app" && python3 -S -B -c "import sys; sys.path.insert(0, '')
from dolphin import cocoa as f
sys.exit(not (f(6, 4) == 2 and f(4, 6) == -2 and f(11, 7) == 4 and f(6, 13) == -7))" 2>/dev/null; then
    reward=1
fi
echo "$reward" > "$logs/reward.txt"
