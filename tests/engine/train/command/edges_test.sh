#!/usr/bin/env bash
# edges_test.sh TANDEM CONFIG: the environment of a run: standard streams that are closed or lose their
# reader, the umask, links, folders that are removed or cannot be synced, a non-finite loss, names with any
# characters.
set -u
tandem=$1 config=$2
. "$(dirname "$0")/runs.sh"
small=(--set model.hidden=16 --set model.layers=1 --set model.head_dim=4 --set model.ffn=32
  --set train.seq=16 --set train.batch=2 --set train.dtype=f32)

train() { # NAME [ARG...]
  local name=$1
  shift
  "$tandem" train "$config" --out "$dir/$name" "${small[@]}" "$@"
}
start() { # NAME
  "$tandem" train "$config" --out "$dir/$1" "${small[@]}" --set train.steps=1000000 >"$dir/$1.log" 2>&1 &
  job=$!
}

# Closed streams: no printed text ends up in a file of the run.
train closed --set train.steps=3 <&- >&- 2>&- || complain "closed streams: exit $?"
[ "$(grep -c '^{"step":' "$dir/closed/metrics.jsonl")" = 3 ] &&
  [ "$(wc -l <"$dir/closed/metrics.jsonl")" = 3 ] ||
  complain "closed streams: metrics.jsonl has" "$(cat "$dir/closed/metrics.jsonl")"

# A reader that closes its pipe.
train piped --set train.steps=3 2>&1 >/dev/null | true
status=("${PIPESTATUS[@]}")
[ "${status[0]}" = 0 ] && [ -e "$dir/piped/final/model.safetensors" ] || complain "2>&1 | true: exit ${status[0]}"

# The umask.
(umask 002 && train shared --set train.steps=1 2>/dev/null)
for file in final/model.safetensors final/config.json metrics.jsonl config.toml; do
  [ "$(stat -c %a "$dir/shared/$file")" = 664 ] || complain "umask 002: $file is $(stat -c %a "$dir/shared/$file")"
done

# What the operators of rank 0 ran.
train counted --set train.steps=2 --tp 2 2>/dev/null || complain "two ranks: exit $?"
receipts=$(tr -d ' \n' <"$dir/counted/receipts.json")
for op in ag_gemm gemm_rs; do
  [[ $receipts =~ \{\"asked\":\"automatic\",\"calls\":[1-9][0-9]*,[^{]*\"op\":\"$op\",\"ran\":\"(serial|overlapped)\" ]] ||
    complain "receipts of $op:" "$receipts"
done

# Strict: operators that would not overlap as asked are refused, one rank and serial ones are not.
# Without times, and with none measured, serial runs.
strict() { TANDEM_STRICT=1 TANDEM_TUNE=0 TANDEM_CACHE_DIR=$dir/no-times train "$@" --set train.steps=1 2>&1; }
text=$(strict strict --tp 2)
status=$?
[ $status = 4 ] && [[ $text =~ "ag_gemm: ".*", 2 ranks: automatic would run as serial: no times are known, and TANDEM_TUNE=0 measures none: expected overlapped, as TANDEM_STRICT=1 requests" ]] &&
  [ ! -e "$dir/strict/final" ] || complain "strict: exit $status:" "$text"
for case in "--tp 1" "--tp 2 --set parallel.strategy=serial" "--tp 2 --set parallel.strategy=overlapped"; do
  text=$(strict allowed $case) || complain "strict $case: exit $?:" "$text"
  rm -rf "$dir/allowed"
done

# A non-finite loss: the last state is saved, and reported.
text=$(train diverged --set train.steps=50 --set optimizer.lr=1000 --set optimizer.min_lr=1000 \
  --set optimizer.warmup=0 --set checkpoint.every=0 2>&1)
status=$?
[ $status = 2 ] && [[ $text =~ "expected finite numbers".*"ended after step "[0-9]+", saved "([^ ]+) ]] &&
  [ -e "${BASH_REMATCH[1]}/state.json" ] || complain "diverged: exit $status:" "$text"

# Stops the run, which would write to its folder while rm empties it. A signal is only sent when kill returns.
pause() {
  kill -STOP $job
  for ((i = 0; i < 600; ++i)); do
    grep -hqv '^[0-9]* (.*) T' /proc/$job/task/*/stat || return
    sleep 0.05
  done
  complain "process $job does not stop"
}

# A folder that was removed, and belongs to another run now, is not touched.
start moved
wait_for "$dir/moved/metrics.jsonl" '"step":2,'
pause
rm -rf "$dir/moved" || complain "moved: rm: exit $?"
train moved --set train.steps=2 2>/dev/null || complain "the second run: exit $?"
before=$(cd "$dir/moved" && find . -type f -exec sha256sum {} + | sort)
kill -TERM $job
kill -CONT $job
wait $job
status=$?
[ $status = 3 ] && grep -q "the folder of this run was removed, and holds another run's now" "$dir/moved.log" ||
  complain "moved: exit $status:" "$(cat "$dir/moved.log")"
after=$(cd "$dir/moved" && find . -type f -exec sha256sum {} + | sort)
[ "$before" = "$after" ] ||
  complain "moved: the other run's files have changed:" "$(diff <(echo "$before") <(echo "$after"))" \
    "$(cat "$dir/moved.log")"

# A comparison with the prediction that cannot be written does not end the run.
mkdir -p "$dir/checked/self_check.json/taken"
text=$(train checked --set train.steps=30 2>&1) || complain "checked: exit $?:" "$text"
[[ $text == *"self-check, steps 3 to 22"*"warning: "*"self_check.json"* ]] || complain "checked:" "$text"

# Only removed: it is created again.
start gone
wait_for "$dir/gone/metrics.jsonl" '"step":2,'
pause
rm -rf "$dir/gone" || complain "gone: rm: exit $?"
kill -TERM $job
kill -CONT $job
wait $job
ls "$dir"/gone/checkpoints/step-*/model.safetensors >/dev/null || complain "gone:" "$(cat "$dir/gone.log")"

# Reports and pictures are not written through links in the run's folder.
echo mine >"$dir/mine"
train linked --set train.steps=3 --set trace.enabled=true 2>/dev/null || complain "linked: exit $?"
for file in report.html summary.json trace.svg; do ln -s "$dir/mine" "$dir/linked/$file"; done
"$tandem" report "$dir/linked" >/dev/null || complain "report: exit $?"
"$tandem" trace "$dir/linked/trace.json" >/dev/null || complain "trace: exit $?"
[ "$(cat "$dir/mine")" = mine ] || complain "a report was written through a link"
ln -s "$dir/mine" "$dir/linked/sample.txt"
text=$("$tandem" report "$dir/linked" 2>&1) && complain "report embeds what a link points to"
[[ $text == *"sample.txt: a symbolic link"* ]] || complain "report: $text"

# An unwritable trace loses nothing else.
mkdir -p "$dir/traced/trace.json/x"
train traced --set train.steps=3 --set trace.enabled=true 2>"$dir/traced.log" || complain "traced: exit $?"
[ -e "$dir/traced/final/model.safetensors" ] && grep -q "trace.json: cannot replace" "$dir/traced.log" ||
  complain "traced:" "$(cat "$dir/traced.log")"

# Names with any characters: commands can be pasted, and contain no terminal control characters.
for name in "my run" $'an\nother\x1b[31m' "it's \$HOME"; do
  log=$dir/named.log
  train "$name" --set train.steps=2 --set data.val_fraction=0.3 2>"$log" || complain "$name: exit $?"
  ! grep -q $'\x1b' "$log" || complain "escape codes in" "$(cat -v "$log")"
  while read -r command; do
    (PATH=$(dirname "$tandem"):$PATH bash -c "$command" </dev/null >/dev/null 2>"$dir/pasted") ||
      complain "pasted: $command: $(cat "$dir/pasted")"
  done < <(grep -o 'tandem \(generate\|eval\) .*' "$log")
  text=$("$tandem" report "$dir/$name/none" 2>&1)
  [ "$(wc -l <<<"$text")" = 1 ] && [[ $text != *$'\x1b'* ]] || complain "an error of several lines: $text"
done

# A file system that cannot sync folders.
if compiler=$(command -v cc || command -v gcc) && ! "$tandem" info | grep -q sanitizers; then
  cat >"$dir/nosync.c" <<'C'
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <sys/stat.h>
int fsync(int fd) {
  struct stat s;
  if (fstat(fd, &s) == 0 && S_ISDIR(s.st_mode)) return errno = EINVAL, -1;
  return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(fd);
}
C
  "$compiler" -shared -fPIC -o "$dir/nosync.so" "$dir/nosync.c" -ldl &&
    { text=$(LD_PRELOAD=$dir/nosync.so train nosync --set train.steps=2 2>&1) || complain "no fsync: exit $?: $text"; }
fi

[ $failures = 0 ] && echo "runs hold at their edges"
exit $((failures > 0))
