#!/usr/bin/env bash
# data_check_test.sh TANDEM CONFIG: output and exit codes of `tandem data check` on a run's ledger.
set -eu
tandem=$1 config=$2
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
export TANDEM_THREADS=1 TANDEM_CACHE_DIR=$dir/cache
head -c 3000 /dev/zero | tr '\0' x >text
checked() { # CODE PATTERN [OPTION...]
  status=0
  "$tandem" data check out "${@:3}" >log 2>&1 || status=$?
  [ "$status" = "$1" ] && grep -qE "$2" log && return
  echo "exit $status, expected $1 and '$2':" "$(cat log)" >&2
  exit 1
}
checked 3 '^tandem: error: out/ledger.jsonl: cannot open: No such file'
"$tandem" train "$config" --out out --dp 2 --set "data.paths=$dir/text" train.steps=5 train.batch=4 train.seq=16 \
  checkpoint.every=2 model.hidden=16 model.head_dim=4 2>/dev/null
checked 0 '^out/ledger.jsonl: 6 lines, 5 steps$'
checked 0 '^samples 0 to 19 consumed once each: 0 epochs of 188 windows, and 20 windows of the next$'
for steps in 1 3 0 100; do
  checked 0 "^samples of ($((steps > 0 && steps < 5 ? steps : 5))) of 5 steps read again: as recorded$" --rehash $steps
done
mv text old
{ head -c 1500 old; printf y; tail -c 1499 old; } >text # other bytes, as many
checked 1 '^out/ledger.jsonl: the hash of the training text is .* now: expected ' --rehash 0
mv old text
cp out/ledger.jsonl whole
sed -i 3d out/ledger.jsonl
checked 1 '^out/ledger.jsonl: line 3: step 3 begins with sample 8: samples 4 to 7 of epoch 0 have no record$'
head -n 5 whole >out/ledger.jsonl # without the last step
checked 1 '^out/ledger.jsonl: out/final: has consumed 20 samples: samples 16 to 19 of epoch 0 have no record$'
cp whole out/ledger.jsonl
printf 'no JSON' >out/final/state.json
checked 0 '^note: not compared with the ledger: out/final/state.json: does not match its own hash'
rm -r out
head -c 900 text >other
"$tandem" train "$config" --out out --set "data.paths=['0.75 $dir/text', '0.25 $dir/other']" train.steps=50 \
  train.batch=4 train.seq=16 model.hidden=16 model.head_dim=4 2>/dev/null
checked 0 '^samples 0 to 199 consumed once each$'
checked 0 '^  1(49|50|51) of source 1 of the blend: 0 epochs of 188 windows, and 1(49|50|51) windows of the next$'
checked 0 '^  (49|50|51) of source 2 of the blend: 0 epochs of 57 windows, and (49|50|51) windows of the next$' --rehash 0
