#!/usr/bin/env bash
# bench_generate_test.sh TANDEM: batches and requests that arrive at random times, on a layer of the smallest model and a small
# vocabulary. A request has the same tokens with no other, and rates and times belong together. Bad input is one line.
set -euo pipefail
tandem=$1
refused() { # EXPECTED ARGUMENTS...
  local expected=$1 text status=0
  shift
  text=$("$tandem" bench generate "$@" 2>&1) || status=$?
  [ $status = 2 ] && [ "$(wc -l <<<"$text")" = 1 ] && grep -q -- "$expected" <<<"$text" ||
    { echo "bench generate $*: exit $status: $text; expected $expected"; exit 1; }
}
refused "layers 20: expected at most llama-1b's 16" --model llama-1b --layers 20
refused 'heads = 32: expected a multiple of tp = 3' --tp 3
refused 'rate 3 --requests 0: expected both or none' --rate 3
refused 'requests 3: expected both or none' --requests 3
refused 'llama-2b not in' --model llama-2b
refused 'weights: int4 not in {none,int8,e4m3}' --weights int4
refused 'batch: Value 0 not in range' --batch 0

check() { # TOKENS ARGUMENTS...
  local tokens=$1
  shift
  "$tandem" bench generate --layers 1 --vocab 1000 "$@" --json - | python3 -c '
import json, sys
r, tokens = json.load(sys.stdin), int(sys.argv[1])
hidden, ffn, heads, kv_heads, head_dim, vocab = 2048, 8192, 32, 8, 64, 1000
weights = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * ffn + hidden * vocab
cached = r["batch"] * (r["prompt"] + r["new"] / 2) * 2 * kv_heads * head_dim
sizes = {"f32": 4, "bf16": 2, "int8": 1 + 2 / 64, "e4m3": 1 + 4 / 128}
size, weight_size = sizes[r["dtype"]], sizes[r["weights"]]
assert (r["op"], r["layers"], r["vocab"]) == ("generate", 1, 1000), r
assert r["same_separately"] is True, r
assert r["receipt"] == [], r["receipt"]  # dense layers on CPU ranks: products and all-reduces, no operator that overlaps
assert r["step_bytes"] == int(weights * weight_size + cached * size), r
embedding = hidden * vocab * size if r["weights"] in ("int8", "e4m3") else 0  # else it is the head
assert abs(r["weight_bytes"] * r["tp"] / (weights * weight_size + embedding) - 1) < 0.01, r
assert r["memory_bytes"] > r["weight_bytes"] and r["load_s"] > 0, r
if r["temperature"] == 0:  # a maximum and a sum
    assert r["logit_bytes"] == 16, r
else:
    assert 16 < r["logit_bytes"] < 4 * vocab / 2, r
assert 0 < r.get("ahead", 0.5) < 1, r  # all but those that prompts or last tokens are in
us = r["time_us"]
assert 0 < us["first_token"] <= r["p99_us"]["first_token"], r
assert 0 < us["next_token"] <= r["p99_us"]["next_token"] + 0.1, r
assert r["tokens_per_s"] > 0 and r["read_gb_per_s"] > 0, r
if tokens:  # all at once: tokens over the time of the batches
    assert abs(r["step_gb_per_s"] - r["step_bytes"] / us["token_step"] * 1e-3) < 0.02 * r["step_gb_per_s"] + 0.001, r
    assert us["next_token"] >= 0.5 * us["token_step"], r
    assert r["tokens_per_s"] <= tokens / (us["first_token"] * 1e-6), r
' "$tokens"
}
check 12 --batch 3 --prompt 20 --new 4 --repeats 2 --tp 2 --dtype f32
check 12 --batch 3 --prompt 30 --new 4 --repeats 1 --tp 2 --weights int8
check 12 --batch 3 --prompt 30 --new 4 --repeats 1 --tp 2 --weights e4m3
check 0 --batch 2 --temperature 1 --top-k 5 --top-p 0.9 --prompt 9 --new 3 --rate 500 --requests 7 --tp 2
check 0 --batch 2 --prompt 9 --new 6 --rate 500 --requests 5 --tp 2 --run-ahead
