#!/usr/bin/env bash
# train_test.sh TANDEM CONFIG [KEY=VALUE...]: trains CONFIG on one GPU, in several layouts, and on CPU ranks.
# Losses agree within the error of bf16; two runs, and a resumed one, write the same bits; checkpoints move
# between CPU and GPU.
set -euo pipefail
tandem=$1 config=$2
shift 2
keys=()
for key in "$@"; do keys+=(--set "$key"); done
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
nvidia-smi -L >/dev/null 2>&1 || exit 77
export TANDEM_DEVICE=cpu
run() { # NAME ARGUMENTS...
  local name=$1
  shift
  "$tandem" train "$config" "${keys[@]}" --out "$out/$name" "$@" 2>"$out/$name.log" || { cat "$out/$name.log"; exit 1; }
}
steps=${TRAIN_STEPS:-200}
run exact --set train.dtype=f32 --set train.steps="$steps"
run cpu --set train.steps="$steps"
run gpu --device gpu --set train.steps="$steps"
if grep -q '^experts' "$config"; then # in bf16 only: refused before anything runs
  "$tandem" train "$config" --device gpu --set train.dtype=f32 --out "$out/gpu_f32" 2>"$out/gpu_f32.log" && exit 1
  grep -q 'train.dtype = f32: expected bf16 on GPUs' "$out/gpu_f32.log"
else
  run gpu_f32 --device gpu --set train.dtype=f32 --set train.steps="$steps"
fi
if [[ " $* " == *document_mask=true* ]] && grep 'simple kernels' "$out/gpu.log"; then exit 1; fi
run again --device gpu --set train.steps="$steps"
cmp "$out/gpu/final/model.safetensors" "$out/again/final/model.safetensors"
run tp2 --device gpu --tp 2 --ranks-per-gpu 2 --set train.steps="$steps"
small=(--device gpu --set parallel.dp_bucket_mib=0.02 --set train.steps="$steps") # many buckets: the ring is reused
run dp2 "${small[@]}" --dp 2 --ranks-per-gpu 2
run dp2_again "${small[@]}" --dp 2 --ranks-per-gpu 2
cmp "$out/dp2/final/model.safetensors" "$out/dp2_again/final/model.safetensors"
if grep -q '^experts' "$config"; then
  run ep2 "${small[@]}" --dp 2 --ep 2 --ranks-per-gpu 2
  run ep2_again "${small[@]}" --dp 2 --ep 2 --ranks-per-gpu 2
  cmp "$out/ep2/final/model.safetensors" "$out/ep2_again/final/model.safetensors"
  else
  run dp4_f32 "${small[@]}" --dp 4 --ranks-per-gpu 4 --set train.dtype=f32
  run microbatches_f32 "${small[@]}" --set train.microbatch=2 --set train.dtype=f32
fi
small+=(--set train.microbatch=2)
for schedule in 1f1b zb-h1; do # pipeline stages
  run pp2_$schedule "${small[@]}" --pp 2 --ranks-per-gpu 2 --set parallel.schedule=$schedule
done
run pp2_1f1b_again "${small[@]}" --pp 2 --ranks-per-gpu 2
cmp "$out/pp2_1f1b/final/model.safetensors" "$out/pp2_1f1b_again/final/model.safetensors"
run layers4 "${small[@]}" --set model.layers=4
for schedule in interleaved zb-v dualpipe-v; do
  run layers4_$schedule "${small[@]}" --pp 2 --ranks-per-gpu 2 \
    --set model.layers=4 parallel.virtual_stages=2 parallel.schedule=$schedule
done
run pp2_int8 "${small[@]}" --pp 2 --ranks-per-gpu 2 --codec stages=int8
run pp2_dp2 "${small[@]}" --pp 2 --dp 2 --ranks-per-gpu 4
"$tandem" train "$config" "${small[@]}" --tp 2 --dp 2 --ranks-per-gpu 4 --out "$out/refused" 2>"$out/refused.log" && exit 1
grep -q 'to be 1 where ranks share a GPU' "$out/refused.log"
half=$((steps / 2))
run moved --device gpu --set train.steps="$steps" --set checkpoint.every="$half"
for device in gpu cpu; do # resumes the second half, on a GPU and on a CPU
  rm -r "$out/moved/final" "$out/moved/checkpoints/step-$(printf %08d "$steps")"
  run moved --resume --device "$device" --set train.steps="$steps" --set checkpoint.every="$half"
  grep -q "resuming from .*step-$(printf %08d "$half")" "$out/moved.log"
  [ "$device" = cpu ] || cmp "$out/gpu/final/model.safetensors" "$out/moved/final/model.safetensors"
done
python3 - "$out" <<'EOF'
import json, os, sys
def losses(name):
    return [json.loads(line)["loss"] for line in open(f"{sys.argv[1]}/{name}/metrics.jsonl")]
def worst(name):
    reference = losses("layers4") if name.startswith("layers4_") else exact
    return max(abs(x - y) for x, y in zip(losses(name), reference, strict=True))
exact = losses("exact")
bound = worst("cpu")
assert exact[-1] < exact[0] - 1, "the model did not learn"
runs = sorted(n for n in os.listdir(sys.argv[1]) if os.path.exists(f"{sys.argv[1]}/{n}/final") and n not in ("exact", "layers4"))
print(f"loss {exact[0]:.4f} to {exact[-1]:.4f}; largest difference to f32 on a CPU: "
      + ", ".join(f"{n} {worst(n):.5f}" for n in runs))
for name in runs:
    limit = 0.5 * bound + 0.002 if name.endswith("_f32") else 3 * bound + 0.01
    assert worst(name) <= limit, f"{name}: {worst(name)}, expected at most {limit}"
EOF
# Without a device, the GPU; and what the model scores there.
TANDEM_DEVICE=auto run default --set train.steps=1
grep -q '^device: gpu (1x .*); --device cpu uses the CPU$' "$out/default.log" || { cat "$out/default.log"; exit 1; }
TANDEM_DEVICE=auto run link --set train.steps=1 --set parallel.link=1GB/s,20us
grep -q '^device: cpu (.* not used: an emulated link)$' "$out/link.log" || { cat "$out/link.log"; exit 1; }
for device in cpu gpu; do
  "$tandem" eval "$out/gpu" --data "$(dirname "$config")/../include" --device $device --json "$out/$device.json" >"$out/eval.log" 2>&1 ||
    { cat "$out/eval.log"; exit 1; }
done
python3 - "$out" <<'EOF'
import json, sys
cpu, gpu = (json.load(open(f"{sys.argv[1]}/{device}.json"))["bits_per_byte"] for device in ("cpu", "gpu"))
print(f"bits per byte: {cpu:.5f} on a CPU in f32, {gpu:.5f} on a GPU in bf16")
assert abs(gpu - cpu) < 0.02 * cpu
EOF
