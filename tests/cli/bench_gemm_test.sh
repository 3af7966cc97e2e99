#!/usr/bin/env bash
# bench_gemm_test.sh TANDEM: products of every form of the weight have the reference's result, and their bytes and rates.
set -eu
tandem=$1
"$tandem" bench gemm --n 200 --k 328 --rows 1,5,64 --weights none,int8,e4m3 --device cpu --json - | python3 -c '
import json, sys
r = json.load(sys.stdin)
assert (r["op"], r["n"], r["k"], r["dtype"]) == ("gemm", 200, 328, "f32"), r
forms = [(run["weights"], run["m"]) for run in r["runs"]]
assert forms == [(w, m) for w in ("none", "int8", "e4m3") for m in (1, 5, 64)], forms
groups = {"none": 200 * 328 * 4, "int8": 200 * 6 * (64 + 2), "e4m3": 200 * 3 * (128 + 4)}  # the last group is shorter
for run in r["runs"]:
    assert run["bytes"] == groups[run["weights"]], run
    assert 0 < run["error"]["max_of_bound"] <= 1, run
    low, high = run["spread_us"]["gemm"]
    assert 0 < low <= run["time_us"]["gemm"] <= high, run
    assert abs(run["gb_per_s"] - run["bytes"] / run["time_us"]["gemm"] * 1e-3) < 0.05 * run["gb_per_s"] + 0.02, run
assert r["copy_gb_per_s"] > 0, r
'
refused() { # EXPECTED ARGUMENTS...
  local expected=$1 text status=0
  shift
  text=$("$tandem" bench gemm "$@" 2>&1) || status=$?
  [ $status = 2 ] && [ "$(wc -l <<<"$text")" = 1 ] && grep -q -- "$expected" <<<"$text" ||
    { echo "bench gemm $*: exit $status: $text; expected $expected"; exit 1; }
}
refused 'rows 65: expected 1 to 64' --rows 1,65 --device cpu
refused 'weights: int4 not in {none,int8,e4m3}' --weights none,int4
