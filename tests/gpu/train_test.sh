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
small=(--device gpu --set parallel.dp_bucket_mib=0.02 --set train.steps="$steps") # many buckets: the ring is reused
run dp2 "${small[@]}" --dp 2 --ranks-per-gpu 2
run dp2_again "${small[@]}" --dp 2 --ranks-per-gpu 2
cmp "$out/dp2/final/model.safetensors" "$out/dp2_again/final/model.safetensors"
run dp4 "${small[@]}" --dp 4 --ranks-per-gpu 4 --set train.dtype=f32
run tp2dp2 "${small[@]}" --tp 2 --dp 2 --ranks-per-gpu 4
run microbatches "${small[@]}" --set train.microbatch=2 --set train.dtype=f32
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
names = "exact cpu gpu gpu_f32 tp2 moved dp2 dp4 tp2dp2 microbatches"
exact, cpu, gpu, f32, tp2, moved, dp2, dp4, tp2dp2, microbatches = (losses(n) for n in names.split())
def worst(a, b):
    return max(abs(x - y) for x, y in zip(a, b, strict=True))
bound = worst(cpu, exact)
print(f"loss {exact[0]:.4f} to {exact[-1]:.4f}; largest difference to f32 on a CPU: bf16 on a CPU {bound:.5f}, on a GPU "
      f"{worst(gpu, exact):.5f}, on 2 ranks of one {worst(tp2, exact):.5f}, begun on a GPU and ended on a CPU "
      f"{worst(moved, exact):.5f}, 2 replicas {worst(dp2, exact):.5f}, 2 of 2 ranks {worst(tp2dp2, exact):.5f}; "
      f"f32 on a GPU {worst(f32, exact):.5f}, 4 replicas {worst(dp4, exact):.5f}, microbatches "
      f"{worst(microbatches, exact):.5f}; 4 replicas to one {worst(dp4, f32):.6f}")
assert exact[-1] < exact[0] - 1, "the model did not learn"
for name, found in (("gpu", gpu), ("tp2", tp2), ("moved", moved), ("dp2", dp2), ("tp2dp2", tp2dp2)):
    assert worst(found, exact) <= 3 * bound + 0.01, name
for name, found in (("f32", f32), ("dp4", dp4), ("microbatches", microbatches)):
    assert worst(found, exact) <= 0.5 * bound + 0.002, name
EOF
