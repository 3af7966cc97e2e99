#!/usr/bin/env bash
# full_disk_test.sh TANDEM CONFIG: a disk without room during a run is reported once, by the file's name, and
# ends neither the training nor its metrics; checkpoints are saved again once there is room. At the start, or
# for the final model, it is an error. The limit of a process on file sizes takes the disk's place.
set -u
tandem=$1 config=$2
. "$(dirname "$0")/runs.sh"
command -v prlimit >/dev/null || { echo "no prlimit: skipped"; exit 0; }
trap '' XFSZ # writes fail instead

# start NAME ARG...
start() {
  local name=$1
  shift
  "$tandem" train "$config" --tp 2 --out "$dir/$name" --set train.seq=16 --set train.dtype=f32 \
    --set checkpoint.every=2 "$@" >"$dir/$name.log" 2>&1 &
  job=$!
}
# fill NAME: from now on the run can write no file beyond 20 kB: metrics of some 30 steps, and no model.
fill() {
  wait_for "$dir/$1/metrics.jsonl" '"step":1,'
  prlimit --pid $job --fsize=20000:unlimited
}
steps() { grep -c '^{"step":' "$dir/$1/metrics.jsonl"; }

start full --set train.steps=1000000
fill full
wait_for "$dir/full.log" "warning: $dir/full/metrics.jsonl: cannot write: File too large"
wait_for "$dir/full.log" "warning: checkpoint of step .* not saved.*step-.*safetensors: cannot write: File too large"
sleep 0.5
kill -0 $job 2>/dev/null || complain "full: ended:" "$(cat "$dir/full.log")"
for text in 'not saved' 'warning: .*metrics.jsonl: cannot write'; do
  [ "$(grep -c "$text" "$dir/full.log")" = 1 ] || complain "full: '$text' more than once:" "$(cat "$dir/full.log")"
done
prlimit --pid $job --fsize=unlimited
wait_for "$dir/full.log" "checkpoints are saved again: $dir/full/checkpoints/step-"
kill -TERM $job
wait $job
status=$?
last=$(sed -n 's/^Stopped after step \([0-9]*\),.*/\1/p' "$dir/full.log")
[ $status = 130 ] && [ "$(steps full)" = "$last" ] || complain "full: exit $status, $(steps full) of $last lines:" "$(cat "$dir/full.log")"
resume=$(sed -n 's/^To go on: //p' "$dir/full.log")
timeout 60 bash -c "$resume --set train.steps=$((last + 2))" >"$dir/resume.log" 2>&1 || complain "failed: $resume" "$(cat "$dir/resume.log")"
[ "$(steps full)" = $((last + 2)) ] || complain "resumed elsewhere"

# Stopped while there is no room: an error that says so.
start stopped --set train.steps=1000000
fill stopped
wait_for "$dir/stopped.log" "warning: checkpoint of step .* not saved"
kill -TERM $job
wait $job
status=$?
[ $status = 3 ] && grep -qE 'error: .*(safetensors|ledger.jsonl): cannot write: File too large' "$dir/stopped.log" ||
  complain "stopped: exit $status:" "$(cat "$dir/stopped.log")"

# The end of a run.
start final --set train.seconds=2
fill final
wait $job
status=$?
[ $status = 3 ] && grep -q "error: .*final/model.safetensors: cannot write: File too large" "$dir/final.log" &&
  grep -qE "warning: step [0-9]* not saved: .*(step-|ledger)" "$dir/final.log" ||
  complain "final: exit $status:" "$(cat "$dir/final.log")"

# Room for a model of half the size, and for no checkpoint.
start nothing --set train.seconds=2 --set checkpoint.export_dtype=bf16 --set checkpoint.every=1000000
wait_for "$dir/nothing/metrics.jsonl" '"step":1,'
prlimit --pid $job --fsize=300000:unlimited
wait $job
status=$?
[ $status = 3 ] && grep -q "error: .*nothing/final is written, but no checkpoint could be saved: .*File too large" "$dir/nothing.log" &&
  [ -e "$dir/nothing/final/model.safetensors" ] || complain "nothing saved: exit $status:" "$(cat "$dir/nothing.log")"

# The start.
text=$(ulimit -f 0 && "$tandem" train "$config" --out "$dir/start" --set train.steps=4 2>&1)
status=$?
[ $status = 3 ] && [[ $text == *"error: $dir/start/"*"File too large"* ]] && ! [ -e "$dir/start/metrics.jsonl" ] ||
  complain "start: exit $status:" "$text"

# Small file systems, where this user may mount some.
small=$dir/small
if mkdir "$small" && mount -t tmpfs -o size=1m tandem "$small" 2>/dev/null; then
  trap 'umount -l "$small"; rm -rf "$dir"' EXIT
  train() { # SIZE ARG...: in a file system of that size
    mount -o remount,size="$1" "$small"
    shift
    timeout 60 "$tandem" train "$config" --out "$small/run" --set train.seq=16 --set train.dtype=f32 "$@" >"$dir/small.log" 2>&1
  }
  train 1m --set train.steps=4
  status=$?
  [ $status = 3 ] && grep -q 'error: .*small/run: .* free: expected .* not even one can be saved' "$dir/small.log" &&
    ! [ -e "$small/run/metrics.jsonl" ] || complain "no room for one: exit $status:" "$(cat "$dir/small.log")"

  # Room for two checkpoints and a model: the older one makes room for the next. Newer snapshots overtake
  # those that wait to be written, so that only a longer run writes three for certain.
  train 64m --set train.steps=2 --set checkpoint.every=2
  one=$(du -sk "$small/run/checkpoints/step-00000002" | cut -f1)
  rm -rf "$small/run"
  train $((one * 28 / 10))k --set train.steps=400 --set checkpoint.every=2 --set checkpoint.keep=2
  status=$?
  [ $status = 0 ] && grep -q 'warning: .* free: expected .*, for 3 more checkpoints of .*checkpoint.keep = 2' "$dir/small.log" &&
    grep -q 'warning: .*no room for step-[0-9]* and one more checkpoint' "$dir/small.log" &&
    ! grep -q 'not saved' "$dir/small.log" || complain "older one: exit $status:" "$(cat "$dir/small.log")"
  [ "$(ls "$small/run/checkpoints" | tail -1)" = step-00000400 ] || complain "older one: $(ls "$small/run/checkpoints")"

  # A folder of checkpoints that cannot be written.
  mkdir "$small/run/ro" && mount -t tmpfs -o ro,size=64k tandem "$small/run/ro"
  mv "$small/run/checkpoints" "$small/run/elsewhere" && ln -s ro "$small/run/checkpoints"
  train 64m --set train.steps=402 --resume
  status=$?
  umount -l "$small/run/ro"
  [ $status = 3 ] && grep -q 'error: .*run/checkpoints/.*Read-only' "$dir/small.log" || complain "read-only: exit $status:" "$(cat "$dir/small.log")"
  umount -l "$small"
  trap 'rm -rf "$dir"' EXIT
else
  echo "no mount: small file systems are not tried"
fi

[ $failures = 0 ] && echo "a full disk ended no run"
exit $((failures > 0))
