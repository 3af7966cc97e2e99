#!/usr/bin/env bash
# failing_allocations_test.sh TANDEM LIBRARY CONFIG RUNS [SEED]: commands in which allocations of memory fail, at
# random places and one or many in a row, end with an error that says so; and a run that ended so goes on to the
# bits of one that did not.
set -u
tandem=$1 library=$2 config=$3 runs=$4 RANDOM=${5:-1}
. "$(dirname "$0")/../engine/train/command/runs.sh"
export TANDEM_DEADLINE_S=20
small=(--tp 2 --set model.layers=1 --set train.seq=16 --set train.batch=4 --set checkpoint.every=2)

train() { timeout -k 1 60 "$tandem" train "$config" "${small[@]}" "$@"; }
# bits RUN: losses of its steps, and its weights.
bits() { grep -oE '"(step|loss)":[^,]*' "$1/metrics.jsonl" && sha256sum <"$1/final/model.safetensors"; }

train --out "$dir/whole" --set train.steps=6 >/dev/null 2>&1 || complain "whole: training failed"
train --out "$dir/half" --set train.steps=4 >/dev/null 2>&1 || complain "half: training failed"

# perform NAME OUT: what runs; it may write to OUT.
perform() {
  case $1 in
    train) train --out "$2" --set train.steps=6 ;;
    resume) train --out "$2" --resume --set train.steps=6 ;;
    eval) timeout -k 1 60 "$tandem" eval "$dir/whole" --data "$config" ;;
    generate) timeout -k 1 60 "$tandem" generate "$dir/whole" --prompt '#include <' --max-tokens 4 ;;
    report) timeout -k 1 60 "$tandem" report "$dir/whole" --csv "$2.csv" ;;
  esac
}

names=(train resume eval generate report)
declare -A total
for name in "${names[@]}"; do
  [ $name = resume ] && cp -r "$dir/half" "$dir/count-$name"
  text=$(export LD_PRELOAD=$library FAILING_TOTAL=$dir/total && perform $name "$dir/count-$name" 2>&1) || complain "$name:" "$text"
  total[$name]=$(cat "$dir/total")
  ((total[$name] > 1000)) || complain "$name: ${total[$name]} allocations: expected thousands"
done

failed=0
for ((run = 0; run < runs; ++run)); do
  name=${names[run % ${#names[@]}]} out=$dir/run-$run
  from=$(((RANDOM << 15 | RANDOM) % total[$name])) count=$((10 ** (RANDOM % 5)))
  [ $name = resume ] && cp -r "$dir/half" "$out"
  text=$(export LD_PRELOAD=$library FAILING_FROM=$from FAILING_COUNT=$count && perform $name "$out" 2>&1)
  status=$?
  case $status in
    0) ;;
    3 | 4)
      failed=$((failed + 1))
      [[ $text =~ error:.*memory ]] || complain "$name: allocation $from + $count: no word of memory:" "$text"
      ;;
    *) complain "$name: allocation $from + $count: exit $status:" "$text" ;;
  esac
  if [ $name = train ] || [ $name = resume ]; then
    again=()
    { [ -e "$out/checkpoints" ] || [ -e "$out/metrics.jsonl" ]; } && again=(--resume)
    if [ $status != 0 ]; then
      text=$(train --out "$out" "${again[@]}" --set train.steps=6 2>&1) || complain "$name: allocation $from + $count: the next run failed:" "$text"
    fi
    [ "$(bits "$out")" = "$(bits "$dir/whole")" ] || complain "$name: allocation $from + $count: other bits in the end"
  fi
  rm -rf "$out"
done
((failed * 2 > runs)) || complain "$failed of $runs commands failed: expected most"
echo "$runs commands, $failed without memory: $failures failures"
exit $((failures > 0))
