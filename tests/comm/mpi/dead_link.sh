#!/usr/bin/env bash
# dead_link.sh NETNS_RUN PROGRAM SECONDS [WRAPPER]: two hosts, of which one loses its network. Both ranks end
# with a Timeout after the deadline of 3 s and have exited SECONDS after they began, whatever they were doing.
# (mpirun itself may wait longer: its daemons use the same network.)
set -u
netns_run=$1 program=$2 seconds=$3 wrapper=${4:-}
dir=$(mktemp -d)
launch=
# shellcheck disable=SC2317  # a trap
cleanup() {
  # Without mpirun, netns_run.sh takes its hosts down.
  [ -z "$launch" ] || { pkill -KILL -P "$launch"; wait "$launch"; }
  rm -rf "$dir"
}
trap cleanup EXIT
cat >"$dir/rank.sh" <<'END'
#!/usr/bin/env bash
SECONDS=0
${3:+"$3"} "$1" dead-link >"$2/log-$OMPI_COMM_WORLD_RANK" 2>&1 </dev/null
echo "$? $SECONDS" >"$2/.end-$OMPI_COMM_WORLD_RANK"
mv "$2/.end-$OMPI_COMM_WORLD_RANK" "$2/end-$OMPI_COMM_WORLD_RANK"
END
chmod +x "$dir/rank.sh"
"$netns_run" --hosts 2 "$dir/rank.sh" "$program" "$dir" "$wrapper" >"$dir/mpirun" 2>&1 &
launch=$!
fail() { echo "$1"; cat "$dir"/mpirun "$dir"/log-* 2>/dev/null; exit 1; }
while [ ! -e "$dir/end-0" ] || [ ! -e "$dir/end-1" ]; do
  [ "$SECONDS" -lt 75 ] || fail "still running after $SECONDS s"
  if ! kill -0 "$launch" 2>/dev/null && [ ! -e "$dir/log-0" ]; then
    wait "$launch"
    status=$?
    cat "$dir/mpirun"
    exit "$status"
  fi
  sleep 0.2
done
for rank in 0 1; do
  read -r status took <"$dir/end-$rank"
  [ "$status" = 5 ] || fail "rank $rank: exit status $status, expected 5 (Timeout)"
  [ "$took" -lt "$seconds" ] || fail "rank $rank took $took s, expected less than $seconds"
  grep -q "error: .*: rank $rank waited 3 s" "$dir/log-$rank" ||
    fail "rank $rank does not say what it waited for"
done
