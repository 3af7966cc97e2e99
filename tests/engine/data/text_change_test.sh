#!/usr/bin/env bash
# text_change_test.sh TANDEM MPIRUN|- CONFIG: truncating or overwriting text during training ends the run with
# the file's name and a checkpoint, from which it continues once the text is restored.
set -u
tandem=$1 mpirun=$2 config=$3
failures=0
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
export TANDEM_THREADS=1 TANDEM_CACHE_DIR=$dir/cache TANDEM_TUNE=0

complain() {
  printf '%s\n' "$@" >&2
  failures=$((failures + 1))
}

# change NAME COMMAND [LAUNCHER...]: COMMAND changes $text during the run.
change() {
  local name=$1 command=$2 job status steps
  shift 2
  text=$dir/$name.txt
  head -c 400000 /dev/zero | tr '\0' x >"$text"
  local words=("$@" "$tandem" train "$config" --tp 2 --out "$dir/$name" --set "data.paths=$text"
    --set model.layers=1)
  timeout -k 1 100 "${words[@]}" --set train.steps=1000000 >"$dir/$name.log" 2>&1 &
  job=$!
  for ((i = 0; i < 1200; ++i)); do
    grep -qs '"step":3,' "$dir/$name/metrics.jsonl" && break
    sleep 0.05
  done
  cp "$text" "$dir/copy"
  eval "$command"
  wait $job
  status=$?
  steps=$(wc -l <"$dir/$name/metrics.jsonl")
  [[ $status = 3 || ($# -gt 0 && $status != 0 && $status -lt 124) ]] &&
    grep -q "error: $text: changed while it is trained on: .*; ended after step $steps, saved $dir/$name/checkpoints/step-0*$steps\$" "$dir/$name.log" ||
    complain "$name: exit $status after $steps steps:" "$(cat "$dir/$name.log")"
  cp "$dir/copy" "$text"
  timeout 60 "${words[@]}" --resume --set train.steps=$((steps + 2)) 2>/dev/null ||
    complain "$name: cannot go on"
}

change cut 'truncate -s 100 "$text"'
change overwritten 'printf other | dd of="$text" bs=1 seek=5 conv=notrunc 2>/dev/null'
[ "$mpirun" = - ] || change processes 'truncate -s 100 "$text"' "$mpirun" 2

[ $failures = 0 ] && echo "changed text ended every run as it should"
exit $((failures > 0))
