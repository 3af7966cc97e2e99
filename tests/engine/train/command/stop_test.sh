#!/usr/bin/env bash
# stop_test.sh TANDEM MPIRUN|- CONFIG EARLY_SIGNAL: SIGINT, SIGTERM and SIGHUP end a run after a step, with a checkpoint
# and the command that resumes it, also if sent twice at once, as by timeout(1); one more, later, ends it at
# once. SIGUSR1 and SIGUSR2 save. Meanwhile no other run writes to its folder.
set -u
tandem=$1 mpirun=$2 config=$3 early_signal=$4
. "$(dirname "$0")/runs.sh"
set -m  # otherwise the shell starts its jobs with SIGINT ignored

# start NAME [ARG...]: starts a run too long to finish, and waits until it has made some steps.
start() {
  local name=$1
  shift
  "$@" train "$config" --tp 2 --out "$dir/$name" --set train.steps=1000000 >"$dir/$name.log" 2>&1 &
  job=$!
  wait_for "$dir/$name/metrics.jsonl" '"step":3,'
}
# ended NAME CODE: checks the exit code and output of the run.
ended() {
  wait "$job"
  local status=$?
  local saved=("$dir/$1"/checkpoints/step-*)
  if [ $status != "$2" ] || ! grep -q "^Stopped after step .*: saved ${saved[0]}$" "$dir/$1.log" ||
    ! grep -q '^To go on: .*train .* --resume$' "$dir/$1.log" || [ -e "$dir/$1/final" ]; then
    complain "$1: exit $status, expected $2, a checkpoint and how to go on, in" "$(cat "$dir/$1.log")"
  fi
}

for signal in INT TERM HUP; do
  start $signal "$tandem"
  if [ $signal = INT ]; then
    text=$("$tandem" train "$config" --out "$dir/INT" --resume 2>&1)
    status=$?
    [ $status = 2 ] && [[ $text == *"$dir/INT: another run (process $job) writes to it"* ]] ||
      complain "a second run: exit $status: $text"
  fi
  kill -$signal $job
  ended $signal 130
done
steps=$(wc -l <"$dir/INT/metrics.jsonl")
resume=$(sed -n 's/^To go on: //p' "$dir/INT.log")
timeout 60 bash -c "$resume --set train.steps=$((steps + 2))" 2>/dev/null || complain "failed: $resume"
[ "$(wc -l <"$dir/INT/metrics.jsonl")" = $((steps + 2)) ] || complain "resumed elsewhere"

# Both signals of timeout(1), to the process and to its group, count as one request.
for signals in "TERM TERM" "INT TERM" "HUP TERM"; do
  start "${signals/ /-}" "$tandem"
  for signal in $signals; do kill -$signal $job 2>/dev/null; done
  ended "${signals/ /-}" 130
done
timeout --preserve-status 5 "$tandem" train "$config" --out "$dir/limit" --set train.steps=1000000 \
  >"$dir/limit.log" 2>&1
ls "$dir"/limit/checkpoints/step-* >/dev/null || complain "timeout: no checkpoint:" "$(cat "$dir/limit.log")"

# A checkpoint on request, after which the run continues.
start saves "$tandem"
for signal in USR1 USR2; do
  ls "$dir/saves/checkpoints" 2>/dev/null >"$dir/before"
  kill -$signal $job
  for ((i = 0; i < 600; ++i)); do
    ls "$dir/saves/checkpoints" 2>/dev/null | grep -v '^\.' >"$dir/after"
    cmp -s "$dir/before" "$dir/after" || break
    sleep 0.05
  done
  cmp -s "$dir/before" "$dir/after" && complain "SIG$signal: no checkpoint"
  kill -0 $job || complain "SIG$signal: ended"
done
kill -TERM $job
wait $job
[ $? = 130 ] || complain "saves: exit $?"

# One that comes while libraries are initialized; a command that is no training gets it as ever.
for command in train launch; do
  program=("$tandem")
  [ $command = train ] || program+=(launch -n 1 -- "$tandem")
  LD_PRELOAD=$early_signal "${program[@]}" train "$config" --out "$dir/preload-$command" --set train.steps=3 \
    checkpoint.every=1000000 >"$dir/preload.log" 2>&1
  status=$?
  [ $status = 0 ] && [ -d "$dir/preload-$command/checkpoints/step-00000001" ] ||
    complain "$command with a signal before main: exit $status:" "$(cat "$dir/preload.log")"
done
text=$("$tandem" launch -n 1 -- sh -c 'kill -USR1 $$; echo lives$((1))' 2>&1)
[[ $text != *lives1* ]] || complain "USR1 does not reach a command: $text"

# One that comes before the run has read its job file counts for the first step; one in the last moments ends nothing.
mkfifo "$dir/job.toml"
sed "s|paths = .*|paths = [\"$(dirname "$config")/../include\"]|" "$config" >"$dir/job"
"$tandem" train "$dir/job.toml" --out "$dir/early" --set train.steps=1000000 checkpoint.every=1000000 \
  >"$dir/early.log" 2>&1 &
job=$!
exec 3>"$dir/job.toml"  # once it is open for reading
kill -USR1 $job
cat "$dir/job" >&3
exec 3>&-
wait_for "$dir/early.log" "parameters;"
for ((i = 0; i < 1200; ++i)); do
  compgen -G "$dir/early/checkpoints/step-*" >/dev/null && break
  sleep 0.05
done
kill -TERM $job
wait $job
[ $? = 130 ] && [ -d "$dir/early/checkpoints/step-00000001" ] || complain "early: exit $?:" "$(cat "$dir/early.log")"
"$tandem" train "$config" --out "$dir/late" --set train.steps=3 >"$dir/late.log" 2>&1 &
job=$!
wait_for "$dir/late.log" "parameters;"
while kill -USR1 $job 2>/dev/null; do :; done
wait $job
status=$?
[ $status = 0 ] || complain "late: exit $status:" "$(cat "$dir/late.log")"

# A second stop request, while the first one waits for a step that takes minutes.
"$tandem" train "$config" --out "$dir/twice" --set train.batch=8192 --set train.microbatch=1 \
  >"$dir/twice.log" 2>&1 &
job=$!
wait_for "$dir/twice.log" "parameters;"
sleep 0.5
kill -INT $job
wait_for "$dir/twice.log" "once more to end at once"
sleep 1.2
kill -INT $job
wait $job
status=$?
[ $status = 130 ] && ! grep -q "^Stopped" "$dir/twice.log" || complain "twice: exit $status:" "$(cat "$dir/twice.log")"

if [ "$mpirun" != - ]; then # a signal to one rank stops all
  start ranks "$mpirun" 2 "$tandem"
  for child in $(pgrep -f "train $config --tp 2 --out $dir/ranks"); do
    [[ $(tr '\0' ' ' <"/proc/$child/cmdline") != "$tandem "* ]] || rank=$child
  done
  kill -TERM "$rank"
  ended ranks 130
fi

[ $failures = 0 ] && echo "every run stopped as it should"
exit $((failures > 0))
