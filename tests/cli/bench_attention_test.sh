#!/usr/bin/env bash
# bench_attention_test.sh TANDEM: every form of context-parallel attention runs, with the reference's result and the
# formulas' bytes, causal and cross, one pass and both; heads is refused where heads do not divide. Bad input is one
# line.
set -euo pipefail
tandem=$1
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
export TANDEM_CACHE_DIR=$out/cache
refused() { # STATUS EXPECTED ARGUMENTS...
  local wanted=$1 expected=$2 text status=0
  shift 2
  text=$("$tandem" bench attention "$@" 2>&1) || status=$?
  [ $status = "$wanted" ] && [ "$(wc -l <<<"$text")" = 1 ] && grep -q -- "$expected" <<<"$text" ||
    { echo "bench attention $*: exit $status: $text; expected $expected"; exit 1; }
}
refused 2 'cp 3: expected the 2 ranks' --ranks 2 --cp 3
refused 2 'heads 3: expected a multiple of kv_heads 2' --heads 3 --kv-heads 2
refused 2 'keys 9: expected seq 8 of causal attention' --seq 8 --keys 9
refused 2 'wire int8: expected groups that divide head_dim 16, not 128 elements' --head-dim 16 --codec int8
refused 2 "codec 'int9'" --codec int9
refused 2 'ranks: Value 1 not in range' --ranks 1
refused 2 "link '1GB': expected" --link 1GB
refused 3 '/nowhere/a.json: cannot be written' --json /nowhere/a.json
bench() { # FILE ARGUMENTS...
  local file=$1
  shift
  "$tandem" bench attention "$@" --head-dim 16 --repeats 2 --json "$out/$file" >"$out/text"
  grep -q '^chosen ' "$out/text"
}
bench causal.json --ranks 2 --cp 2 --seq 61 --heads 4 --kv-heads 2 --backward
bench cross.json --ranks 3 --seq 7 --keys 112 --heads 2 --kv-heads 1 --cross --dtype bf16
bench window.json --cp 2 --seq 64 --heads 4 --kv-heads 4 --window 9 --contiguous
bench encoded.json --cp 2 --seq 61 --heads 4 --kv-heads 2 --backward --codec int8:g16
python3 - "$out" <<'EOP'
import json, sys
def read(name):
    return json.load(open(f"{sys.argv[1]}/{name}.json"))
for name, forms in (("causal", "gather heads queries ring"), ("cross", "gather queries ring"),
                    ("window", "gather heads queries ring"), ("encoded", "gather heads queries ring")):
    r = read(name)
    assert r["op"] == "attention" and sorted(r["config"]["candidates_us"]) == forms.split(), r
    assert r["bytes"] == r["bytes_formula"] and min(r["bytes"].values()) > 0, r
    assert r["error"]["max_of_bound"] <= 1 and r["bitwise_equal_runs"] and r["bytes_agree"], r
    assert r["config"]["chosen"] in r["config"]["candidates_us"], r
    passes = [r["config"]["chosen"], r["config"]["chosen_backward"]]
    assert [row["candidate"] for row in r["receipt"]] == passes[:1 + (r["passes"] == "both")], r
    for row in r["receipt"]:
        assert row["ran"] == r["config"]["candidates_us"][row["candidate"]]["form"] and row["calls"] > 0, r
        assert (row["ran"] == "serial") == ("faster" in row["why"]), r
    assert r["time_us"]["limit"] == max(r["time_us"]["compute"], r["time_us"]["wire"]), r
causal, cross, window, encoded = read("causal"), read("cross"), read("window"), read("encoded")
# Keys and values at 1.125 bytes an element and whole 16 bytes, in both passes; queries and gradients as before.
assert (encoded["codec"]["text"], causal["codec"]) == ("int8:g16", None), encoded
assert all(encoded["bytes"][f] < causal["bytes"][f] for f in ("gather", "heads", "ring")), encoded
assert encoded["bytes"]["queries"] == causal["bytes"]["queries"], encoded
assert (causal["mask"], causal["passes"], causal["keys"], causal["cp"]) == ("causal", "both", 61, 2), causal
assert (cross["mask"], cross["passes"], cross["keys"], cross["ranks"]) == ("cross", "forward", 112, 3), cross
assert "kv_heads 1: expected a multiple of the 3 ranks" in cross["config"]["refused"], cross
# 3 ranks, 7 and 112 positions: queries travel for less than keys.
assert cross["bytes"]["queries"] < cross["bytes"]["ring"] == cross["bytes"]["gather"], cross
assert (window["window"], window["rows"]) == (9, "contiguous"), window
EOP
