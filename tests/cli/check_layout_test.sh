#!/usr/bin/env bash
# check_layout_test.sh TANDEM SOURCE_DIR: results, exit codes and errors of `tandem check-layout`.
set -eu
tandem=$1 source=$2
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
export TANDEM_THREADS=1
mkdir text
cp "$source/include/tandem/norm.h" text
small=(--set "data.paths=$dir/text" train.batch=4 train.seq=16 train.microbatch=1 model.hidden=16 model.head_dim=4)
fail() {
  echo "$1" >&2
  shift
  [ $# = 0 ] || cat "$@" >&2
  exit 1
}
refused() { # CODE TEXT ARG...: one line, before anything is computed
  code=$1 text=$2
  shift 2
  status=0
  "$tandem" check-layout "$@" >log 2>&1 || status=$?
  [ "$status" = "$code" ] || fail "check-layout $*: exit $status, expected $code" log
  grep -qF -- "$text" log || fail "check-layout $*: expected '$text':" log
  [ "$(wc -l <log)" = 1 ] || fail "check-layout $*: expected one line:" log
}
tiny=$source/configs/tiny.toml moe=$source/configs/moe.toml

"$tandem" check-layout "$tiny" --tp 2 --dp 2 "${small[@]}" >log || fail 'tiny: exit code' log
grep -q '^tp 2 dp 2 ep 1, f32, against one rank: 20 tensors, bound 2e-06$' log || fail 'tiny:' log
grep -q '^The layout computes what one rank does.$' log || fail 'tiny:' log
"$tandem" check-layout "$tiny" --cp 2 --tp 2 "${small[@]}" train.seq=13 >log || fail 'tiny with cp: exit code' log
grep -q '^tp 2 cp 2 dp 1 ep 1, f32, against one rank: 20 tensors, bound 2e-06$' log || fail 'tiny with cp:' log
"$tandem" check-layout "$tiny" --cp 4 "${small[@]}" train.seq=3 >log || fail 'a rank without tokens: exit code' log
"$tandem" check-layout "$moe" --tp 2 --dp 2 --ep 2 --pp 2 --json - "${small[@]}" >printed.json
"$tandem" check-layout "$moe" --tp 2 --dp 2 --ep 2 --pp 2 --json written.json "${small[@]}" >log
cmp printed.json written.json
python3 - printed.json <<'END'
import json, sys
result = json.load(open(sys.argv[1]))
assert list(result) == ["worst", "tensor", "differs", "axis", "tensors", "loss", "bound", "ok"], result
assert result["ok"] and result["differs"] == result["axis"] == "" and result["tensors"] == 64, result
assert 0 < result["worst"] <= result["bound"] == 2e-6 and result["loss"] <= 2e-6, result
END
# In bf16, tensor-parallel ranks round differently, and some of 512 tokens choose another of 64
# experts.
status=0
"$tandem" check-layout "$moe" --tp 2 --set "data.paths=$dir/text" train.dtype=bf16 \
  model.experts=64 model.top_k=1 model.expert_ffn=16 --json result.json >log 2>&1 || status=$?
[ "$status" = 1 ] || fail "bf16 with experts: exit $status, expected 1" log
grep -q '^The layout differs from one rank in: gradient of model.*experts' log || fail 'bf16 with experts:' log
grep -q '^With tp 1 it does not.$' log || fail 'bf16 with experts:' log
grep -q '"axis":"tp".*"bound":0.02,"ok":false' result.json || fail 'bf16 with experts:' result.json

refused 2 'config is missing' --tp 2
refused 3 'missing.toml' missing.toml
refused 2 '--tp: Value 0 not in range' "$tiny" --tp 0
refused 2 'train.batch is 8: expected a multiple of parallel.dp = 3' "$tiny" --dp 3
refused 2 'model.heads = 4: expected a multiple of tp = 3' "$tiny" --tp 3
refused 2 'parallel.ep is 2: expected a divisor of parallel.dp = 1' "$moe" --ep 2
refused 2 'parallel.pp x parallel.virtual_stages is 4: expected at most model.layers = 2' "$tiny" --pp 2 --schedule zb-v
refused 2 'schedule' "$tiny" --pp 2 --schedule zigzag
refused 2 'check-layout: parallel.codec is int8: expected none' "$tiny" --tp 2 --set parallel.codec=int8
refused 2 'check-layout: 128 ranks: expected at most 64' "$tiny" --tp 4 --dp 32 --set train.batch=32
refused 2 "unknown key 'train.sek'" "$tiny" --set train.sek=2
refused 3 'nowhere' "$tiny" --json nowhere/result.json
