#!/usr/bin/env bash
# run_folder_test.sh TANDEM CONFIG: files that are removed from OUT during a run are made again, a resume names what
# was removed or changed, and a run whose OUT has become another's ends by name and touches nothing of it.
set -u
tandem=$1 config=$2
. "$(dirname "$0")/runs.sh"

# start NAME ARG...
start() {
  local name=$1
  shift
  "$tandem" train "$config" --out "$dir/$name" --set train.seq=16 --set train.dtype=f32 "$@" >"$dir/$name.log" 2>&1 &
  job=$!
}
stop() { kill -TERM "$1" && wait "$1"; }

start run --set train.steps=1000000
wait_for "$dir/run/metrics.jsonl" '"step":3,'
rm "$dir/run/metrics.jsonl"
wait_for "$dir/run/metrics.jsonl" '"step":'
rm "$dir/run/ledger.jsonl"
wait_for "$dir/run/ledger.jsonl" '"record":"step"'
stop $job
status=$?
[ $status = 130 ] || complain "removed logs: exit $status" "$(cat "$dir/run.log")"
for name in metrics ledger; do
  grep -q "warning: $dir/run/$name.jsonl was removed or replaced: it is continued from here" "$dir/run.log" ||
    complain "removed logs: $name is not named" "$(cat "$dir/run.log")"
done
last=$(sed -n 's/^Stopped after step \([0-9]*\),.*/\1/p' "$dir/run.log")
grep -q "\"step\":$last," "$dir/run/metrics.jsonl" || complain "removed logs: no line of step $last"
resume() { timeout 60 "$tandem" train "$config" --out "$dir/run" --set train.seq=16 --set train.dtype=f32 --set train.steps="$1" --resume >"$dir/resume.log" 2>&1; }
resume $((last + 1)) || complain "resume failed" "$(cat "$dir/resume.log")"
for text in "run/metrics.jsonl: no lines of [0-9]* of the $last steps (the first: step 1)" "run/ledger.jsonl: line 1: the run starts after step"; do
  grep -q "$text" "$dir/resume.log" || complain "resume does not say '$text'" "$(cat "$dir/resume.log")"
done

# A start that is refused leaves a folder that the corrected command can use.
"$tandem" train "$config" --out "$dir/refused" --set train.steps=2 --set data.val_fraction=0 --set train.validate_every=1 >"$dir/refused.log" 2>&1 &&
  complain "a validation of nothing is accepted" "$(cat "$dir/refused.log")"
"$tandem" train "$config" --out "$dir/refused" --set train.steps=2 >"$dir/refused.log" 2>&1 ||
  complain "the corrected command is refused" "$(cat "$dir/refused.log")"

# A line of the ledger that was changed, and none that was not.
start whole --set train.steps=4
wait $job || complain "whole failed" "$(cat "$dir/whole.log")"
resumed() { timeout 60 "$tandem" train "$config" --out "$dir/whole" --set train.seq=16 --set train.dtype=f32 --set train.steps="$1" --resume 2>&1; }
text=$(resumed 5) && [[ $text != *"removed or changed"* ]] || complain "whole: named" "$text"
sed -i '3s/"tokens":/"tokens":1/' "$dir/whole/ledger.jsonl"
sed -i 2d "$dir/whole/metrics.jsonl"
text=$(resumed 6)
[[ $text == *"whole/ledger.jsonl: line 3: "*"removed or changed"* && $text == *"whole/metrics.jsonl: no lines of 1 of the 5 steps (the first: step 2)"* ]] ||
  complain "changed: not named" "$text"

# Another run takes the folder.
start first --set train.steps=1000000
first=$job
wait_for "$dir/first/metrics.jsonl" '"step":3,'
mv "$dir/first" "$dir/moved"
mv "$dir/first.log" "$dir/moved.log"
start first --set train.steps=1000000 --set train.batch=4
second=$job
wait $first
status=$?
[ $status = 3 ] && grep -q "error: --out $dir/first: the folder of this run was removed, and holds another run's now (process $second)" "$dir/moved.log" ||
  complain "taken: exit $status" "$(cat "$dir/moved.log")"
wait_for "$dir/first/metrics.jsonl" '"step":3,'
stop $second
[ "$(grep -c '"batch":8' "$dir/first/metrics.jsonl")" = 0 ] && ! [ -e "$dir/first/final" ] && [ "$(ls "$dir/first/checkpoints" | wc -l)" = 1 ] ||
  complain "taken: the second run's folder was written" "$(ls -R "$dir/first")"

# The other run has ended.
start first2 --set train.steps=1000000
first=$job
wait_for "$dir/first2/metrics.jsonl" '"step":3,'
kill -STOP $first
mv "$dir/first2" "$dir/moved2"
mv "$dir/first2.log" "$dir/moved2.log"
start first2 --set train.steps=2
wait $job || complain "second run failed" "$(cat "$dir/first2.log")"
before=$(cd "$dir/first2" && find . -type f -exec md5sum {} + | sort)
kill -CONT $first
wait $first
status=$?
[ $status = 3 ] && grep -q "holds another run's now (checkpoints)" "$dir/moved2.log" || complain "ended: exit $status" "$(cat "$dir/moved2.log")"
after=$(cd "$dir/first2" && find . -type f -exec md5sum {} + | sort)
[ "$before" = "$after" ] || complain "ended: the folder was written" "$(diff <(echo "$before") <(echo "$after"))"

# Links in OUT: ranks and trace are not followed, checkpoints are.
mkdir -p "$dir/linked" "$dir/other/ranks" "$dir/other/trace" "$dir/other/checkpoints"
for name in ranks trace checkpoints; do ln -s "../other/$name" "$dir/linked/$name"; done
start linked --resume --set train.steps=2 --set trace.stream_mib=1
wait $job || complain "linked: failed" "$(cat "$dir/linked.log")"
for name in ranks trace; do
  grep -q "linked/$name: a symbolic link" "$dir/linked.log" && [ -z "$(ls "$dir/other/$name")" ] ||
    complain "linked: $name" "$(cat "$dir/linked.log")"
done
[ "$(ls "$dir/other/checkpoints")" = step-00000002 ] || complain "linked: checkpoints" "$(ls -R "$dir/other")"

[ $failures = 0 ] && echo "runs keep to their folders"
exit $((failures > 0))
