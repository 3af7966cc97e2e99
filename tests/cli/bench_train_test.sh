#!/usr/bin/env bash
# bench_train_test.sh TANDEM: a layer of the smallest model on two tensor-parallel ranks. Its gradients are
# compared with one rank's in f32 and with those of saved activations, and rates and times belong together. Bad input is one line.
set -euo pipefail
tandem=$1
refused() { # EXPECTED ARGUMENTS...
  local expected=$1 text status=0
  shift
  text=$("$tandem" bench train "$@" 2>&1) || status=$?
  [ $status = 2 ] && [ "$(wc -l <<<"$text")" = 1 ] && grep -q -- "$expected" <<<"$text" ||
    { echo "bench train $*: exit $status: $text; expected $expected"; exit 1; }
}
refused "layers 20: expected at most llama-1b's 16" --model llama-1b --layers 20
refused 'ep 2: llama-1b has no experts' --model llama-1b --ep 2
refused 'heads = 32: expected a multiple of tp = 3' --tp 3
refused 'did you mean --model' --modl llama-1b
refused 'llama-2b not in' --model llama-2b
refused 'ranks-per-gpu 2: expected --device gpu' --ranks-per-gpu 2
refused 'window: Value -1 not in range' --window=-1

notes=$(mktemp)
trap 'rm -f "$notes"' EXIT
"$tandem" bench train --model llama-1b --layers 1 --seq 8 --window 3 --repeats 1 --tp 2 --recompute full --json - 2>"$notes" | python3 -c '
import json, re, sys
r, notes = json.load(sys.stdin), open(sys.argv[1]).read().splitlines()
hidden, ffn, heads, kv_heads, head_dim, seq, window = 2048, 8192, 32, 8, 64, 8, 3
matrices = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * ffn
flops = seq * (6 * matrices + 6 * heads * head_dim * (2 * window - window**2 / seq))
rate = flops / r["time_us"]["step"] * 1e-6 / 2
assert (r["op"], r["layers"], r["ranks"], r["tokens"], r["window"]) == ("train", 1, 2, 8, 3), r
assert abs(r["tflops"] - rate) <= 0.0051, (r["tflops"], rate)
assert 0 < r["error"]["max_of_bound"] <= 1 and r["error"]["tensor"].startswith("model.layers.0."), r["error"]
assert r["bitwise_equal_runs"] is True
assert abs(r["exposed_us"] - (r["time_us"]["step"] - r["time_us"]["alone"])) < 0.1
assert r["recompute"] == "full" and r["activation_bytes"] > seq // 2 * hidden * 4 * 2
assert r["memory_bytes"] > 4 * matrices and (r["mfu"] is None or 0 < r["mfu"] <= 1), r["mfu"]
assert {row["op"] for row in r["receipt"]} == {"ag_gemm", "gemm_rs", "ag_wgrad"} and all(row["calls"] for row in r["receipt"]), r
# The comparison of gradients says on rank 0 what it computes, and how long f32 took.
of_weights, took = notes
millions = float(re.search(r"8 tokens on a CPU rank, in f32 and bf16: ([\d.]+)M parameters, [\d.]+ TFLOP each$", of_weights)[1])
assert abs(millions - matrices / 1e6) < 0.2, (millions, matrices)
assert re.search(r"f32 took [\d.]+ s, bf16 takes about as long$", took), took
' "$notes"
