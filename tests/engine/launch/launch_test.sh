#!/usr/bin/env bash
# launch_test.sh TANDEM RANKS: worlds that `tandem launch --probe` forms, and its errors.
set -eu
tandem=$1 ranks=$2
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
fail() {
  echo "$1" >&2
  shift
  [ $# = 0 ] || cat "$@" >&2
  exit 1
}
probe() { # RANKS TP PP: forms it, and keeps its memory within the bound
  "$tandem" launch --probe "$1" --tp "$2" --pp "$3" --json - >"$dir/json" 2>"$dir/log" ||
    fail "probe $1 $2 $3:" "$dir/log"
  python3 - "$dir/json" "$1" "$(($1 / $2 / $3))" <<'EOF' || fail "probe $1 $2 $3: wrong figures" "$dir/json"
import json, sys
result = json.load(open(sys.argv[1]))
assert result["ranks"] == int(sys.argv[2]) and result["dp"] == int(sys.argv[3]), result
assert result["world_s"] > 0 and result["groups_s"] > 0 and result["barrier_ms"] > 0, result
assert (0 if result["ranks"] == 1 else 1) <= result["bytes_per_rank"] < 8e6, result
EOF
}
refused() { # CODE TEXT ARG...
  code=$1 text=$2
  shift 2
  status=0
  "$tandem" launch "$@" >"$dir/log" 2>&1 || status=$?
  [ "$status" = "$code" ] || fail "launch $*: exit $status, expected $code" "$dir/log"
  grep -qF -- "$text" "$dir/log" || fail "launch $*: expected '$text':" "$dir/log"
  [ "$(wc -l <"$dir/log")" = 1 ] || fail "launch $*: expected one line:" "$dir/log"
}

# Processes.
"$tandem" launch -n 3 -- sh -c 'echo "$RANK/$WORLD_SIZE $LOCAL_RANK"; echo "e$RANK" >&2' >"$dir/out" 2>"$dir/log"
[ "$(sort "$dir/out")" = "$(printf '[0] 0/3 0\n[1] 1/3 1\n[2] 2/3 2')" ] || fail "output of three ranks:" "$dir/out"
[ "$(sort "$dir/log")" = "$(printf '[0] e0\n[1] e1\n[2] e2')" ] || fail "errors of three ranks:" "$dir/log"
[ "$("$tandem" launch -n 1 -- printf 'no newline')" = 'no newline' ] || fail "output of one rank"
ends() { # STATUS LINE COMMAND: ranks that wait when rank 1 fails are ended
  status=0
  SECONDS=0
  "$tandem" launch -n 3 -- sh -c "[ \$RANK != 1 ] || { $3; }; exec sleep 60" >"$dir/log" 2>&1 || status=$?
  [ "$status" = "$1" ] || fail "'$3': exit $status, expected $1" "$dir/log"
  [ "$SECONDS" -lt 30 ] || fail "'$3': $SECONDS s"
  [ "$(grep -cE "$2" "$dir/log")" = 1 ] && [ "$(wc -l <"$dir/log")" = 1 ] || fail "'$3': expected '$2':" "$dir/log"
}
ends 7 '^tandem: launch: rank 1 \(process [0-9]+\) ended with exit status 7$' 'exit 7'
ends 137 '^tandem: launch: rank 1 .* was ended by signal 9, Killed$' 'kill -9 $$'
# Processes that a rank has started get signals, too, and do not keep the launcher.
"$tandem" launch -n 2 -- sh -c 'trap "echo saved; exit 0" USR1; echo ready; sleep 50 & wait' >"$dir/out" 2>"$dir/log" &
for _ in $(seq 100); do [ "$(wc -l <"$dir/out")" = 2 ] && break || sleep 0.1; done
kill -USR1 $!
wait $! || fail "SIGUSR1: exit $?" "$dir/log"
[ "$(grep -c saved "$dir/out")" = 2 ] || fail "SIGUSR1 did not reach the ranks:" "$dir/out"
SECONDS=0
"$tandem" launch -n 2 -- sh -c 'sleep 40 & exit 0' || fail "left processes: exit $?"
"$tandem" launch -n 2 -- sh -c '[ $RANK = 0 ] || exit 5; sleep 40; true' >"$dir/log" 2>&1 && fail "exit 0 after a failure"
[ "$SECONDS" -lt 25 ] || fail "processes of ranks kept the launcher for $SECONDS s"
# What a killed process has started is ended with it.
status=0
pid=$("$tandem" launch -n 1 -- sh -c 'sleep 1000 & echo "$!"; kill -9 $$' 2>"$dir/log") || status=$?
[ $status = 137 ] || fail "a killed rank: exit $status" "$dir/log"
runs() { # PID: has not ended; one that nobody has waited for has
  grep -qs '^State:[[:space:]]*[^ZX[:space:]]' "/proc/$1/status"
}
for _ in $(seq 100); do runs "$pid" || break; sleep 0.1; done
! runs "$pid" || fail "process $pid outlives its killed rank"
# Variables of a launcher above do not reach the ranks.
for variable in OMPI_COMM_WORLD_RANK PMI_RANK PMI_SIZE PMI_FD PMIX_RANK SLURM_PROCID SLURM_STEP_ID SLURM_JOB_ID; do
  export $variable=0
done
found=$("$tandem" launch -n 2 -- sh -c 'env | grep -E "^(OMPI|PMI|PMIX|SLURM)_" | tr "\n" " "' | sort -u | tr '\n' '|')
[ "$found" = '[0] SLURM_JOB_ID=0 |[1] SLURM_JOB_ID=0 |' ] || fail "variables of another launcher: $found"
for variable in OMPI_COMM_WORLD_RANK PMI_RANK PMI_SIZE PMI_FD PMIX_RANK SLURM_PROCID SLURM_STEP_ID SLURM_JOB_ID; do
  unset $variable
done
[ "$("$tandem" launch -n 2 --port 12345 -- sh -c 'echo $MASTER_PORT' | sort -u | tr '\n' ' ')" = '[0] 12345 [1] 12345 ' ] ||
  fail "the port of ranks on one host"
refused 2 '--port: Value 65530 not in range' -n 1 --port 65530 -- true
refused 2 'launch --diagnose: command true: expected tandem train' -n 1 --diagnose -- true
# A run that failed is diagnosed once, also with a supervised launcher; one that is stopped is not.
config=$(cd "$(dirname "$0")/../../../configs" && pwd)/tiny.toml
for replaces in '' '--min-dp 2'; do
  # shellcheck disable=SC2086  # none or two words
  TANDEM_TUNE=0 "$tandem" launch -n 2 $replaces --diagnose -- "$tandem" train "$config" --dp 2 --out "$dir/run$replaces" \
    --set train.steps=100000 >/dev/null 2>"$dir/log" &
  launcher=$!
  for _ in $(seq 400); do "$tandem" doctor "$dir/run$replaces" >"$dir/none" 2>&1 && break || sleep 0.1; done
  parent=$launcher
  [ -z "$replaces" ] || parent=$(cut -d" " -f1 "/proc/$launcher/task/$launcher/children")
  rank=$(cut -d" " -f1 "/proc/$parent/task/$parent/children")
  kill -9 "$rank"
  wait $launcher && fail "exit 0 after a killed rank"
  [ "$(grep -c "^tandem: launch: tandem doctor " "$dir/log")" = 1 ] && [ "$(sed '1,/tandem doctor/d' "$dir/log" | wc -l)" -ge 5 ] && grep -q '^[0-9]* steps up to step ' "$dir/log" ||
    fail "expected one diagnosis:" "$dir/log"
done
# A job that could not continue with fewer replicas does not begin.
status=0
"$tandem" launch -n 2 --min-dp 1 -- "$tandem" train "$config" --dp 2 --out "$dir/fewer" \
  --set train.dtype=bf16 train.gradient_dtype=bf16 >"$dir/log" 2>&1 || status=$?
[ $status = 2 ] || fail "a job without fewer replicas: exit $status" "$dir/log"
expected='launch --min-dp 1: with 1 of 2 data-parallel ranks: train.gradient_dtype is bf16 with parallel.replicas = 2: expected f32'
grep -qF -- "$expected" "$dir/log" || fail "expected '$expected':" "$dir/log"
[ -z "$(ls "$dir/fewer")" ] || fail "a job that is refused has written" "$dir/log"
# A folder that this user may not enter would give another reason.
PATH=/usr/bin:/bin refused 2 'launch: no-such-command: No such file or directory: expected a command' -n 2 -- no-such-command
refused 2 'expected either -n with a command, or --probe' -n 2 --probe 2 -- true
refused 2 'launch: no command' -n 2

probe 1 1 1
probe 12 3 2           # groups of 3, 2 and 2 ranks
probe 130 1 1          # data-parallel group of more ranks than exchange directly, in two processes
probe "$ranks" 8 4
refused 2 '10 ranks with tp 4 pp 1: expected a multiple of 4' --probe 10 --tp 4
refused 2 '--probe' --probe 0
refused 2 '--tp' --probe 4 --tp x
status=0
(ulimit -n 300 && "$tandem" launch --probe 600 >"$dir/log" 2>&1) || status=$?
[ $status = 4 ] || fail "few files: exit $status, expected 4" "$dir/log"
grep -q '600 ranks: a process may open 300 files: expected 1200' "$dir/log" || fail "few files:" "$dir/log"
status=0
(ulimit -n 200 && "$tandem" launch -n 2 --spares 1 -- "$tandem" train job.toml --out "$dir/none" >"$dir/log" 2>&1) || status=$?
[ $status = 4 ] && grep -q '3 processes: this one may open 200 files: expected 309 (ulimit -n)' "$dir/log" ||
  fail "few files: exit $status, expected 4" "$dir/log"
