#!/usr/bin/env bash
# bench_checkpoint_test.sh TANDEM: small checkpoints of one rank and of two, loaded again with the same bits. Rates and
# times belong together, and the folder is gone afterwards. Bad input is one line.
set -euo pipefail
tandem=$1
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
refused() { # STATUS EXPECTED ARGUMENTS...
  local wanted=$1 expected=$2 text status=0
  shift 2
  text=$("$tandem" bench checkpoint --device cpu "$@" 2>&1) || status=$?
  [ $status = "$wanted" ] && [ "$(wc -l <<<"$text")" = 1 ] && grep -q -- "$expected" <<<"$text" ||
    { echo "bench checkpoint $*: exit $status: $text; expected $expected"; exit 1; }
}
mkdir "$out/there"
touch "$out/there/file"
refused 3 'there: exists: expected a new folder' "$out/there"
[ -f "$out/there/file" ]
refused 2 'folder is missing'
refused 2 'size: Value 0 not in range' "$out/new" --size 0
refused 2 'expected at most this machine' "$out/new" --size 90000
[ ! -e "$out/new" ]
for ranks in 1 2; do
  "$tandem" bench checkpoint "$out/new" --size 0.003 --ranks $ranks --repeats 2 --device cpu --json "$out/$ranks.json" \
    >"$out/text"
  grep -q "ranks: $ranks; median of 2" "$out/text"
  [ ! -e "$out/new" ]
  python3 - "$out/$ranks.json" $ranks <<'EOP'
import json, sys
r, ranks = json.load(open(sys.argv[1])), int(sys.argv[2])
assert (r["op"], r["ranks"], r["repeats"]) == ("checkpoint", ranks, 2), r
assert abs(r["bytes"] / (12 * r["parameters"]) - 1) < 0.01 and abs(r["bytes"] / 3e6 - 1) < 0.5, r
names = {"blocked", "copied", "saved", "loaded", "verified", "disk_write", "disk_read"}
assert set(r["time_us"]) == set(r["gb_per_s_per_rank"]) == names, r
for name, us in r["time_us"].items():
    rate = r["bytes"] / ranks / us * 1e-3
    assert abs(r["gb_per_s_per_rank"][name] - rate) <= 0.001 + 0.01 * rate, (name, us, rate)
    assert r["spread_us"][name][0] <= us <= r["spread_us"][name][1]
assert r["time_us"]["blocked"] <= r["time_us"]["saved"]
EOP
done
