#!/usr/bin/env bash
# mixed_builds.sh PROGRAM: ranks 0 and 1 of a world, one of which runs PROGRAM with another build ID, refuse
# each other by name, unless both allow it.
set -u
program=$1
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -c '
import sys
data = open(sys.argv[1], "rb").read()
note = b"\x04\0\0\0\x14\0\0\0\x03\0\0\0GNU\0"
at = data.index(note) + len(note)
open(sys.argv[2], "wb").write(data[:at] + bytes([data[at] ^ 255]) + data[at + 1:])
' "$program" "$dir/program" && chmod +x "$dir/program" || exit 1
ranks() {
  local port=$((20000 + RANDOM % 9000)) rank
  local -a programs=("$program" "$dir/program")
  for rank in 0 1; do
    RANK=$rank WORLD_SIZE=2 LOCAL_RANK=$rank LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port \
      TORCHELASTIC_RUN_ID=mixed$$ "${programs[rank]}" once &
  done
  wait
}
said=$(ranks 2>&1)
refusal='^error: rank 0 runs Tandem [0-9.]+, build .*; rank 1 runs Tandem .*: expected the same program'
[ "$(grep -cE "$refusal" <<< "$said")" = 2 ] || { echo "$said"; exit 1; }
said=$(TANDEM_ALLOW_MIXED_BUILDS=1 ranks 2>&1)
[ "$(grep -c '^done$' <<< "$said")" = 2 ] || { echo "$said"; exit 1; }
