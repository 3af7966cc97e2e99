#!/usr/bin/env bash
# trace_merge_test.sh TANDEM CONFIG: a run of processes streams its events, `tandem trace --merge` makes one trace
# of them, and `tandem doctor` judges links by it; wrong files and steps are refused.
set -eu
tandem=$1 config=$2
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
export TANDEM_THREADS=1 TANDEM_CACHE_DIR=$dir/cache TANDEM_TUNE=0
fail() { printf '%s\n' "$@" >&2; exit 1; }
refused() { # refused TEXT ARGUMENT...: exits with an error that has the text
  local text=$1
  shift
  if "$tandem" "$@" >"$dir/text" 2>&1; then fail "accepted: $*"; fi
  grep -q -e "$text" "$dir/text" || fail "$*: expected '$text': $(cat "$dir/text")"
}

"$tandem" launch -n 4 -- "$tandem" train "$config" --dp 2 --pp 2 --out "$dir/run" --set train.steps=4 train.batch=4 \
  train.microbatch=1 train.seq=16 train.dtype=f32 trace.stream_mib=4 >"$dir/log" 2>&1 || fail "$(cat "$dir/log")"
"$tandem" trace "$dir/run" --merge "$dir/all.json" --steps 2:3 >"$dir/text" || fail "$(cat "$dir/text")"
grep -q '^Wrote .*all.json: [0-9]* events and [0-9]* arrows of 4 ranks, steps 2 to 3, clocks within [0-9.]* us$' \
  "$dir/text" || fail "$(cat "$dir/text")"
python3 - "$dir/all.json" <<'END' || fail "all.json"
import collections, json, sys
trace = json.load(open(sys.argv[1]))
events = trace["traceEvents"]
starts = [e for e in events if e["ph"] == "s"]
ends = {e["id"]: e for e in events if e["ph"] == "f"}
assert {e["pid"] for e in events} == {0, 1, 2, 3}
assert sorted(e["id"] for e in starts) == sorted(ends)
count = collections.Counter((e["name"], e["pid"], ends[e["id"]]["pid"]) for e in starts)
for replica in 0, 1:  # two steps of two microbatches
    assert count["pp_activations", replica, replica + 2] == 4, count
    assert count["pp_gradients", replica + 2, replica] == 4, count
data = trace["otherData"]
assert data["backward_us"] <= 2 * data["clock_bound_us"], data
END
"$tandem" trace "$dir/all.json" >"$dir/text" || fail "$(cat "$dir/text")"
"$tandem" doctor "$dir/run" >"$dir/text" || fail "$(cat "$dir/text")"
grep -q -e 'link' "$dir/text" || fail "doctor: $(cat "$dir/text")"

refused 'no events in these steps' trace "$dir/run" --merge "$dir/none.json" --steps 90:91
refused '--steps 3:2: expected a last step after the first' trace "$dir/run" --merge "$dir/none.json" --steps 3:2
refused '--steps x: expected FIRST:LAST or one step' trace "$dir/run" --merge "$dir/none.json" --steps x
refused 'a folder: expected a file: tandem trace .*run --merge FILE' trace "$dir/run"
refused 'no events: expected those of a run with trace.stream_mib' trace "$dir/cache" --merge "$dir/none.json"
[ ! -e "$dir/none.json" ] || fail "a refused merge left a file"
