#!/usr/bin/env bash
# learners_test.sh TANDEM CONFIG: trains CONFIG with learners that exchange every few steps, on a GPU that they
# share and on CPU ranks. Losses agree within the error of bf16, in f32 within that of rounding; two runs, and one
# that is resumed while a fragment travels, write the same bits; checkpoints move between CPU and GPU.
set -euo pipefail
tandem=$1 config=$2
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
nvidia-smi -L >/dev/null 2>&1 || exit 77
export TANDEM_DEVICE=cpu
steps=${TRAIN_STEPS:-42}
keys=(--set parallel.dp_bucket_mib=0.02 --set train.steps="$steps" --set sync.method=local sync.learners=2)
run() { # NAME ARGUMENTS...
  local name=$1
  shift
  "$tandem" train "$config" "${keys[@]}" --dp "$dp" --out "$out/$name" "$@" 2>"$out/$name.log" ||
    { cat "$out/$name.log"; exit 1; }
}
refuse() { # MESSAGE ARGUMENTS...
  local message=$1
  shift
  "$tandem" train "$config" "${keys[@]}" --dp 2 "${gpu[@]}" --out "$out/refused" "$@" 2>"$out/refused.log" && exit 1
  grep -q "$message" "$out/refused.log" || { cat "$out/refused.log"; exit 1; }
}
dp=2 gpu=(--device gpu --ranks-per-gpu 2) f32=(--set train.dtype=f32)
streamed=(--set sync.every=8 sync.fragments=2 sync.delay=2)
run dense_exact "${f32[@]}" --set sync.every=4
run dense_f32 "${f32[@]}" --set sync.every=4 "${gpu[@]}"
run dense_bf16 --set sync.every=4 "${gpu[@]}"
run int4_exact "${f32[@]}" "${streamed[@]}" --set sync.codec=int4:g32
run int4_f32 "${f32[@]}" "${streamed[@]}" --set sync.codec=int4:g32 "${gpu[@]}"
run topk_exact "${f32[@]}" --set sync.every=4 sync.topk=0.05
run topk_f32 "${f32[@]}" --set sync.every=4 sync.topk=0.05 "${gpu[@]}"
run int4_bf16 "${streamed[@]}" --set sync.codec=int4:g32 "${gpu[@]}"
run again "${streamed[@]}" --set sync.codec=int4:g32 "${gpu[@]}"
cmp "$out/int4_bf16/final/model.safetensors" "$out/again/final/model.safetensors"
experts=$(dirname "$config")/gpu-moe.toml
for name in experts experts_again; do
  "$tandem" train "$experts" "${keys[@]}" --dp 2 "${gpu[@]}" --out "$out/$name" "${streamed[@]}" 2>"$out/$name.log" ||
    { cat "$out/$name.log"; exit 1; }
done
cmp "$out/experts/final/model.safetensors" "$out/experts_again/final/model.safetensors"
run demo_exact "${f32[@]}" --set sync.method=demo
run demo_f32 "${f32[@]}" --set sync.method=demo "${gpu[@]}"
run other "${streamed[@]}" --set sync.codec=int4:g32 sync.outer.lr=0.5 "${gpu[@]}"
cmp -s "$out/int4_bf16/final/model.safetensors" "$out/other/final/model.safetensors" && exit 1
dp=4 gpu=(--device gpu --ranks-per-gpu 4)
run replicas_exact "${f32[@]}" --set sync.every=4
run replicas_f32 "${f32[@]}" --set sync.every=4 "${gpu[@]}"
run replicas_bf16 "${streamed[@]}" --set sync.codec=int4:g32 "${gpu[@]}"
dp=2 gpu=(--device gpu --ranks-per-gpu 2)
in_flight=$((steps / 2 / 4 * 4 + 1)) # a step after a fragment was sent
moved=("${streamed[@]}" --set sync.codec=int4:g32 checkpoint.every="$in_flight")
run moved "${moved[@]}" "${gpu[@]}"
cmp "$out/int4_bf16/final/model.safetensors" "$out/moved/final/model.safetensors"
for device in gpu cpu; do # resumes on a GPU and on CPU ranks
  rm -r "$out/moved/final"
  find "$out/moved/checkpoints" -maxdepth 1 -name 'step-*' ! -name "step-$(printf %08d "$in_flight")" -exec rm -r {} +
  where=("${gpu[@]}")
  [ "$device" = gpu ] || where=(--device cpu)
  run moved --resume "${moved[@]}" "${where[@]}"
  grep -q "resuming from .*step-$(printf %08d "$in_flight")" "$out/moved.log"
  [ "$device" = cpu ] || cmp "$out/int4_bf16/final/model.safetensors" "$out/moved/final/model.safetensors"
done
refuse 'sync.codec = lossless: expected a format of one size on GPUs' --set sync.every=4 sync.codec=lossless
python3 - "$out" <<'EOP'
import json, sys
def losses(name):
    return [json.loads(line)["loss"] for line in open(f"{sys.argv[1]}/{name}/metrics.jsonl")]
def sent(name):
    return [json.loads(line)["sent_bytes"]["sync"] for line in open(f"{sys.argv[1]}/{name}/metrics.jsonl")]
def worst(name, reference):
    return max(abs(x - y) for x, y in zip(losses(name), losses(reference), strict=True))
exact = losses("dense_exact")
assert exact[-1] < exact[0] - 0.5, "the model did not learn"
for name, bound in (("dense_f32", 0.002), ("dense_bf16", 0.05), ("int4_f32", 0.02), ("topk_f32", 0.02),
                    ("int4_bf16", 0.05), ("replicas_f32", 0.002), ("demo_f32", 0.1)):
    reference = name.split("_")[0] + "_exact"
    difference = worst(name, reference)
    print(f"{name}: largest difference to f32 on CPU ranks {difference:.5f}")
    assert difference <= bound, f"{name}: expected at most {bound}"
    assert sent(name) == sent(reference), f"{name}: bytes sent {sent(name)}, on CPU ranks {sent(reference)}"
    assert any(sent(name))
assert losses("int4_bf16")[-1] != losses("other")[-1]
experts = losses("experts")
assert experts[-1] < experts[0] - 0.5, f"the model with experts did not learn: {experts}"
EOP
