#!/usr/bin/env bash
# gpu_suites.sh BIN OUT [SUITE...]: runs suites of gpu_test on this machine's GPUs, each at 1, 2, 3,
# 4 and 8 ranks (SUITE_RANKS), which share a GPU if there are too few, in separate processes with a
# time limit each (SUITE_SECONDS, 100), several at a time (SUITE_JOBS, 1: a GPU without other
# programs delays no rank). Writes the output to OUT/RANKS.log, which tools/gpu_test_matrix.py
# reads; lists failed, unfinished and skipped tests at the end. Exit code 1 if there are any.
set -u
bin=$1 out=$2
shift 2
mkdir -p "$out"
export NCCL_NVLS_ENABLE=0 TANDEM_DEADLINE_S=${TANDEM_DEADLINE_S:-30}
tests=$out/tests.txt
"$bin/gpu_test" --gtest_list_tests | sed 's/ *#.*//' | awk '/^[^ ]/ { suite = $1; next } { print suite $1 }' >"$tests"
ranks_of() { # a test's name ends with its number of ranks; one rank if it has none
  sed -nE "s,^((Gpu|World)/)?[A-Za-z0-9]+\..*/gpus([0-9]+)\$,\3,p" <<<"$1"
}
[ $# -gt 0 ] || set -- $(sed -E 's,^(Gpu/|World/)?([A-Za-z0-9]+)\..*,\2,' "$tests" | sort -u | grep -v '^Sanitized')
begin=$SECONDS failed=0
for ranks in ${SUITE_RANKS:-1 2 3 4 8}; do
  for suite in "$@"; do
    names=$(grep -E "(^|/)$suite\." "$tests" | while read -r name; do
      of=$(ranks_of "$name")
      [ "${of:-1}" = "$ranks" ] && echo "$name"
    done | paste -sd:)
    [ -n "$names" ] || continue
    echo "$ranks $suite $names"
  done
done >"$out/plan.txt"
export bin out
run_one() {
  local ranks=$1 suite=$2 names=$3 log begin=$SECONDS code
  log=$out/part-$ranks-$suite.log
  export TANDEM_CACHE_DIR=$out/cache/$ranks-$suite # concurrent programs write separate tuner files
  timeout "${SUITE_SECONDS:-100}" "$bin/gpu_test" --gtest_filter="$names" >"$log" 2>&1
  code=$?
  echo "$suite at $ranks: exit code $code, $((SECONDS - begin)) s, $(grep -c '^\[       OK' "$log") passed, $(grep -c '^\[  SKIPPED \].*(' "$log") skipped"
}
export -f run_one
xargs -P "${SUITE_JOBS:-1}" -L 1 bash -c 'run_one "$@"' _ <"$out/plan.txt" | tee "$out/summary.txt"
for ranks in ${SUITE_RANKS:-1 2 3 4 8}; do
  for log in "$out"/part-"$ranks"-*.log; do [ -e "$log" ] && cat "$log"; done >"$out/$ranks.log"
done
rm -f "$out"/part-*.log
echo "--- $((SECONDS - begin)) s; not passed:"
grep -vE 'exit code 0,.* 0 skipped' "$out/summary.txt" && failed=1
grep -hE '^\[  FAILED  \] .*ms\)' "$out"/*.log && failed=1
exit $failed
