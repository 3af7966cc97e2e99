#!/usr/bin/env bash
# endings.sh LAUNCHER PROGRAM WAY RANKS SECONDS LINES PATTERN: under RANKS ranks, PROGRAM WAY ends within
# SECONDS without being killed, and prints PATTERN on exactly LINES lines. It fails unless WAY is "twice".
set -u
launcher=$1 program=$2 way=$3 ranks=$4 seconds=$5 lines=$6 pattern=$7
SECONDS=0
output=$(timeout -k 1 "$seconds" "$launcher" "$ranks" "$program" "$way" 2>&1)
status=$?
fail() { printf '%s\n--- %s: %s\n' "$output" "$way" "$1"; exit 1; }
[ "$SECONDS" -lt "$seconds" ] || fail "still running after $seconds s"
if [ "$way" = twice ]; then
  [ $status -eq 0 ] || fail "exit status $status, expected 0"
else
  [ $status -ne 0 ] || fail "exit status 0, expected another"
fi
seen=$(printf '%s\n' "$output" | grep -cE "$pattern")
[ "$seen" -eq "$lines" ] || fail "'$pattern' on $seen lines, expected $lines"
[ "$way" != killed ] || ! pgrep -fx "$program killed" > /dev/null || fail "a rank is left over"
