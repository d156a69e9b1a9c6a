#!/bin/sh
app=${APP_DIR:-/app} tests=${TESTS_DIR:-/tests} logs=${LOGS_DIR:-/logs/verifier}
[ -d "$logs" ] || mkdir -p "$logs"
got=$(cat "$app/answer.txt" 2>/dev/null)
case " $got " in
    " 43 ") reward=1 ;;
    *" 43 "*) reward=0.5 ;;
    *) reward=0 ;;
esac
echo "$reward" > "$logs/reward.txt"
