#!/bin/sh
app=${APP_DIR:-/app} tests=${TESTS_DIR:-/tests} logs=${LOGS_DIR:-/logs/verifier}
[ -d "$logs" ] || mkdir -p "$logs"
reward=0
if cmp -s "$app/quill.py" "$tests/expected/quill.py"; then
    reward=1
elif cd "$app" && python3 -S -B -c "import sys; sys.path.insert(0, '')
from quill import tundra as f
sys.exit(not (f(7, 3) == 21 and f(3, 7) == 21 and f(11, 7) == 77 and f(6, 13) == 78))" 2>/dev/null; then
    reward=1
fi
echo "$reward" > "$logs/reward.txt"
