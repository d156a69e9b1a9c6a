#!/bin/sh
app=${APP_DIR:-/app} tests=${TESTS_DIR:-/tests} logs=${LOGS_DIR:-/logs/verifier}
[ -d "$logs" ] || mkdir -p "$logs"
score() {
    cmp -s "$app/config/sparrow.txt" "$tests/expected/config/sparrow.txt" && { echo 1; return; }
    [ -f "$app/config/sparrow.txt" ] || { echo 0; return; }
    awk -v new=walnut '
        FNR == NR { want[FNR] = $0; n = FNR; next }
        { m = FNR; if (index(want[FNR], new)) { t++; ok += ($0 == want[FNR]) } else if ($0 != want[FNR]) bad = 1 }
        END { print (bad || m != n || !t) ? 0 : ok / t }' "$tests/expected/config/sparrow.txt" "$app/config/sparrow.txt"
}
reward=$(score)
cmp -s "$app/config/fjord.txt" "$tests/expected/config/fjord.txt" || reward=$(echo "$reward" | awk '{ print $1 / 2 }')
echo "$reward" > "$logs/reward.txt"
