#!/bin/sh
app=${APP_DIR:-/app} tests=${TESTS_DIR:-/tests} logs=${LOGS_DIR:-/logs/verifier}
[ -d "$logs" ] || mkdir -p "$logs"
score() {
    cmp -s "$app/docs/sable.txt" "$tests/expected/docs/sable.txt" && { echo 1; return; }
    [ -f "$app/docs/sable.txt" ] || { echo 0; return; }
    awk -v new=cotton '
        FNR == NR { want[FNR] = $0; n = FNR; next }
        { m = FNR; if (index(want[FNR], new)) { t++; ok += ($0 == want[FNR]) } else if ($0 != want[FNR]) bad = 1 }
        END { print (bad || m != n || !t) ? 0 : ok / t }' "$tests/expected/docs/sable.txt" "$app/docs/sable.txt"
}
reward=$(score)
cmp -s "$app/docs/yarrow.txt" "$tests/expected/docs/yarrow.txt" || reward=$(echo "$reward" | awk '{ print $1 / 2 }')
echo "$reward" > "$logs/reward.txt"
