#!/usr/bin/env bash
# data_check_test.sh TANDEM CONFIG: output and exit codes of `tandem data check` on a run's ledger.
set -eu
tandem=$1 config=$2
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
export TANDEM_THREADS=1 TANDEM_CACHE_DIR=$dir/cache
head -c 3000 /dev/zero | tr '\0' x >text
checked() { # CODE PATTERN
  status=0
  "$tandem" data check out >log 2>&1 || status=$?
  [ "$status" = "$1" ] && grep -qE "$2" log && return
  echo "exit $status, expected $1 and '$2':" "$(cat log)" >&2
  exit 1
}
checked 3 '^tandem: error: out/ledger.jsonl: cannot open: No such file'
"$tandem" train "$config" --out out --dp 2 --set "data.paths=$dir/text" train.steps=5 train.batch=4 train.seq=16 \
  checkpoint.every=2 model.hidden=16 model.head_dim=4 2>/dev/null
checked 0 '^out/ledger.jsonl: 6 lines, 5 steps$'
checked 0 '^samples 0 to 19 consumed once each: 0 epochs of 188 windows, and 20 windows of the next$'
cp out/ledger.jsonl whole
sed -i 3d out/ledger.jsonl
checked 1 '^out/ledger.jsonl: line 3: step 3 begins with sample 8: samples 4 to 7 of epoch 0 have no record$'
head -n 5 whole >out/ledger.jsonl # without the last step
checked 1 '^out/ledger.jsonl: out/final: has consumed 20 samples: samples 16 to 19 of epoch 0 have no record$'
cp whole out/ledger.jsonl
printf 'no JSON' >out/final/state.json
checked 0 '^note: not compared with the ledger: out/final/state.json: does not match its own hash'
