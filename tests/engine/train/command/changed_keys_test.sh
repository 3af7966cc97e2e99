#!/usr/bin/env bash
# changed_keys_test.sh TANDEM CONFIG: keys that change when a run is resumed mean in it what they mean in a run that
# had them from the start, and its folder has what the log says.
set -u
tandem=$1 config=$2
. "$(dirname "$0")/runs.sh"
small=(--set model.layers=1 --set train.seq=32 --set train.batch=4 --set train.dtype=f32)

# train NAME ARG...: its log is $dir/NAME.log.
train() {
  local name=$1
  shift
  timeout 60 "$tandem" train "$config" --out "$dir/$name" "${small[@]}" "$@" >"$dir/$name.log" 2>&1 ||
    complain "$name: exit $?:" "$(cat "$dir/$name.log")"
}
# numbers NAME KEY: of all steps.
numbers() { grep -oE "\"$2\":[^,}]*" "$dir/$1/metrics.jsonl"; }
weights() { sha256sum <"$dir/$1/model.safetensors"; }
# keep_step NAME STEP: the run goes on from this checkpoint.
keep_step() { find "$dir/$1/checkpoints" -mindepth 1 -maxdepth 1 -name 'step-*' ! -name "step-*0$2" -exec rm -r {} +; }

# A text that begins with line breaks is the same in the files of a run.
separator=(--set 'data.document_separator="\n\n"' --set data.document_mask=true)
train text --set train.steps=2 "${separator[@]}"
train text --resume --set train.steps=3 "${separator[@]}"
"$tandem" data check "$dir/text" >"$dir/check" 2>&1 || complain "data check:" "$(cat "$dir/check")"
sed 's/^steps = .*/steps = 3/' "$dir/text/config.toml" >"$dir/same.toml"
timeout 60 "$tandem" train "$dir/same.toml" --out "$dir/same" >/dev/null 2>&1 || complain "same: training failed"
[ "$(numbers text loss)" = "$(numbers same loss)" ] || complain "config.toml trains on other text"

# The lowest loss counts from where its weights are kept; a model that was removed is written again.
lowest=(--set data.val_fraction=0.3 --set train.validate_every=2 --set optimizer.lr=0.5 --set optimizer.warmup=3
  --set optimizer.schedule=constant --set checkpoint.every=2)
train best --set train.steps=8 "${lowest[@]}"
train best --resume --set train.steps=10 --set train.save_best=true "${lowest[@]}"
[ "$(weights best/final)" = "$(weights best/checkpoints/step-00000010)" ] || complain "best: final/ is not of step 10"
rm -r "$dir/best/final"
train best --resume --set train.steps=10 --set train.save_best=true "${lowest[@]}"
grep -q "warning: $dir/best/final was removed" "$dir/best.log" || complain "best:" "$(cat "$dir/best.log")"
[ -e "$dir/best/final/model.safetensors" ] || complain "best: no model"

# A shorter warm-up that is over.
rates=(--set train.tokens=1536 --set optimizer.schedule=linear --set checkpoint.every=5 --set checkpoint.keep=9)
train rate --set optimizer.warmup=10 "${rates[@]}"
keep_step rate 5
train rate --resume --set optimizer.warmup=3 "${rates[@]}"
train short --set optimizer.warmup=3 "${rates[@]}"
[ "$(numbers rate lr | tail -7)" = "$(numbers short lr | tail -7)" ] || complain "rate:" "$(numbers rate lr)" "$(numbers short lr)"

# What is sent before the first step is of no step.
train sent --tp 2 --set train.steps=3 --set data.val_fraction=0.2 --set train.validate_every=100
[ "$(numbers sent tp_bytes | sort -u | wc -l)" = 1 ] || complain "sent:" "$(numbers sent tp_bytes)"

echo "$failures failures"
exit $((failures > 0))
