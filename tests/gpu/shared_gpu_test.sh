#!/usr/bin/env bash
# shared_gpu_test.sh TANDEM CONFIG: trains CONFIG in f32 with processes that share one GPU, in layouts of several axes.
# Losses agree with those of CPU ranks, two runs have the same bits; threads are refused tp with dp, by name.
set -euo pipefail
tandem=$1 config=$2
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
nvidia-smi -L >/dev/null 2>&1 || exit 77
steps=${TRAIN_STEPS:-10}
job=(--set train.dtype=f32 train.steps="$steps" train.microbatch=2 parallel.dp_bucket_mib=0.02)
"$tandem" train "$config" --device cpu "${job[@]}" --out "$out/exact" 2>"$out/exact.log" || { cat "$out/exact.log"; exit 1; }
run() { # NAME RANKS ARGUMENTS...
  local name=$1 ranks=$2 begin=$SECONDS
  shift 2
  "$tandem" launch -n "$ranks" -- "$tandem" train "$config" --device gpu --ranks-per-gpu "$ranks" "${job[@]}" \
    --out "$out/$name" "$@" >"$out/$name.log" 2>&1 || { cat "$out/$name.log"; exit 1; }
  python3 - "$out" "$name" $((SECONDS - begin)) <<'EOF'
import json, sys
out, name, seconds = sys.argv[1:]
losses = [[json.loads(line)["loss"] for line in open(f"{out}/{run}/metrics.jsonl")] for run in ("exact", name)]
worst = max(abs(x - y) for x, y in zip(*losses, strict=True))
print(f"{name}: {seconds} s, largest difference to a CPU {worst:.6f}", flush=True)
assert worst < 2e-3, losses
EOF
}
run tp2_dp2 4 --tp 2 --dp 2
run again 4 --tp 2 --dp 2
cmp "$out/tp2_dp2/final/model.safetensors" "$out/again/final/model.safetensors"
run tp2_pp2 4 --tp 2 --pp 2
if "$tandem" train "$config" --device gpu --ranks-per-gpu 4 --tp 2 --dp 2 --out "$out/refused" 2>"$out/refused.log"; then exit 1; fi
grep -q 'to be 1 where ranks share a GPU' "$out/refused.log"
