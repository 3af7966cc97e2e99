#!/usr/bin/env bash
# killed_pipeline_test.sh PROGRAM TEXT LAUNCHER short|long: for each schedule, a rank is killed in each phase of a
# step; long: each rank in turn. Each of the others names it in its error and ends within the deadline.
# Under mpirun, which ends all ranks once one is killed, some may end before they print: mpirun names the
# killed rank, and the ranks that print do.
set -eu
program=$1 text=$2 launcher=$3 extent=$4
deadline=10
case $launcher in *mpirun*) mpi=1 ;; *) mpi=0 ;; esac
kills=0 slowest=0

# judge RANK END: verdict on a run's output: "ok SLOWEST", with the seconds from the kill to the last rank's end, or
# what is wrong.
judge() {
  awk -v killed="$1" -v end="$2" -v deadline=$deadline -v mpi=$mpi '
    function fault(text) { if (!said) print text; said = 1 }
    /^killed at/ { ++kills; at = $3 }
    /ran all steps/ { fault("rank " $2 " ended without an error") }
    /^rank . ended at/ {
      ++ended; times[$2] = $5 + 0
      if ($0 !~ "aborted by rank " killed ": its process is gone") fault("rank " $2 " does not name rank " killed)
    }
    /noticed that process rank/ { noticed = $0 ~ "process rank " killed " .*signal 9" }
    END {
      if (mpi ? !noticed : kills != 1 || ended != 3) fault(kills + 0 " kills, named by " ended + 0 " ranks")
      for (rank in times) if (kills && times[rank] - at > slowest) slowest = times[rank] - at
      if (slowest > deadline) fault("a rank ended " slowest " s after the kill")
      if (kills && end - at > 2 * deadline) fault("the launcher ended " end - at " s after the kill")
      if (!said) printf "ok %.3f\n", slowest
    }'
}

# kill_one SCHEDULE PHASE RANK
kill_one() {
  local output verdict status=0
  output=$(timeout -k 1 100 "$launcher" 4 "$program" "$1" "$2" "$3" "$text" 2>&1) || status=$?
  case $status:$1-$2 in
    64:gpipe-steady | 64:gpipe-weight | 64:1f1b-weight | 64:interleaved-weight) return ;;  # no such phase
    0:*) verdict="exit status 0" ;;
    *) verdict=$(judge "$3" "$(date +%s.%3N)" <<<"$output") ;;
  esac
  case $verdict in
    ok*) kills=$((kills + 1)) slowest=$(printf '%s\n' "$slowest" "${verdict#ok }" | sort -n | tail -1) ;;
    *) printf '%s\n--- %s, %s, rank %s: exit status %s: %s\n' "$output" "$@" "$status" "$verdict"; exit 1 ;;
  esac
}

if [ "$extent" = long ]; then
  for schedule in gpipe 1f1b interleaved zb-h1 zb-v dualpipe-v; do
    for phase in warm-up steady cool-down weight reduction update sharing; do
      for rank in 0 1 2 3; do kill_one $schedule $phase $rank; done
    done
  done
  expected=152
elif [ $mpi = 1 ]; then
  kill_one zb-v weight 1
  kill_one 1f1b sharing 2
  expected=2
else
  kill_one gpipe warm-up 2
  kill_one 1f1b steady 0
  kill_one interleaved cool-down 3
  kill_one zb-h1 weight 1
  kill_one zb-v reduction 2
  kill_one dualpipe-v update 3
  kill_one interleaved sharing 0
  expected=7
fi
echo "$kills ranks killed; the others ended at most $slowest s later"
[ $kills = $expected ] || { echo "expected $expected"; exit 1; }
