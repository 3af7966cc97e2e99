#!/usr/bin/env bash
# pipeline_kill_test.sh TANDEM LAUNCH CONFIG: a process of a pipeline is killed at different moments of a run.
# The others end within seconds, and all name that rank: none names one that left because of it.
set -eu
tandem=$1 launch=$2 config=$3
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
export TANDEM_THREADS=1 TANDEM_CACHE_DIR=$dir/cache TANDEM_TUNE=0
fail() { echo "$1" >&2; exit 1; }

# shellcheck disable=SC2016  # expanded by each rank
for victim in 0 1 2 3; do
  out=$dir/$victim
  mkdir "$out"
  "$launch" 4 bash -c 'echo $$ >"$0/pid-$RANK"; exec "$@" >"$0/log-$RANK" 2>&1' "$out" \
    "$tandem" train "$config" --pp 2 --dp 2 --out "$out/run" --set train.steps=100000 --set train.microbatch=1 \
    --set checkpoint.every=20 &
  ranks=$!
  until [ -s "$out/run/metrics.jsonl" ]; do
    kill -0 $ranks 2>/dev/null || fail "no step: $(cat "$out"/log-*)"
    sleep 0.02
  done
  sleep 0.$((victim * 2 + RANDOM % 2))
  kill -KILL "$(cat "$out/pid-$victim")"
  SECONDS=0
  wait $ranks && fail "the ranks ended without an error"
  [ $SECONDS -lt 20 ] || fail "rank $victim was killed, and the others ended after $SECONDS s"
  for rank in 0 1 2 3; do
    [ $rank = "$victim" ] ||
      grep -q "rank $rank: error: aborted by rank $victim: its process is gone" "$out/log-$rank" ||
      fail "rank $victim was killed, rank $rank says: $(cat "$out/log-$rank")"
  done
done
