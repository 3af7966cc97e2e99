#!/usr/bin/env bash
# train_test.sh TANDEM CONFIG: trains CONFIG on one GPU and on CPU ranks. Losses agree within the error
# of bf16; two runs, and a resumed one, write the same bits; checkpoints move between CPU and GPU.
set -euo pipefail
tandem=$1 config=$2
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
nvidia-smi -L >/dev/null 2>&1 || exit 77
run() { # NAME ARGUMENTS...
  local name=$1
  shift
  "$tandem" train "$config" --out "$out/$name" "$@" 2>"$out/$name.log" || { cat "$out/$name.log"; exit 1; }
}
steps=${TRAIN_STEPS:-200}
run exact --set train.dtype=f32 --set train.steps="$steps"
run cpu --set train.steps="$steps"
run gpu --device gpu --set train.steps="$steps"
run gpu_f32 --device gpu --set train.dtype=f32 --set train.steps="$steps"
run again --device gpu --set train.steps="$steps"
cmp "$out/gpu/final/model.safetensors" "$out/again/final/model.safetensors"
run tp2 --device gpu --tp 2 --ranks-per-gpu 2 --set train.steps="$steps"
half=$((steps / 2))
run moved --device gpu --set train.steps="$steps" --set checkpoint.every="$half"
for device in gpu cpu; do # resumes the second half, on a GPU and on a CPU
  rm -r "$out/moved/final" "$out/moved/checkpoints/step-$(printf %08d "$steps")"
  run moved --resume --device "$device" --set train.steps="$steps" --set checkpoint.every="$half"
  grep -q "resuming from .*step-$(printf %08d "$half")" "$out/moved.log"
  [ "$device" = cpu ] || cmp "$out/gpu/final/model.safetensors" "$out/moved/final/model.safetensors"
done
python3 - "$out" <<'EOF'
import json, sys
def losses(name):
    return [json.loads(line)["loss"] for line in open(f"{sys.argv[1]}/{name}/metrics.jsonl")]
exact, cpu, gpu, f32, tp2, moved = (losses(n) for n in ("exact", "cpu", "gpu", "gpu_f32", "tp2", "moved"))
def worst(a, b):
    return max(abs(x - y) for x, y in zip(a, b, strict=True))
bound = worst(cpu, exact)
print(f"loss {exact[0]:.4f} to {exact[-1]:.4f}; largest difference to f32 on a CPU: bf16 on a CPU {bound:.5f}, on a GPU "
      f"{worst(gpu, exact):.5f}, on 2 ranks of one {worst(tp2, exact):.5f}, begun on a GPU and ended on a CPU "
      f"{worst(moved, exact):.5f}; f32 on a GPU {worst(f32, exact):.5f}")
assert exact[-1] < exact[0] - 1, "the model did not learn"
for name, found in (("gpu", gpu), ("tp2", tp2), ("moved", moved)):
    assert worst(found, exact) <= 3 * bound + 0.01, name
assert worst(f32, exact) <= 0.5 * bound + 0.002, "f32"
EOF
