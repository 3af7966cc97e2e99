#!/usr/bin/env bash
# host_bytes_test.sh NETNS_RUN TANDEM CONFIG: two hosts of two data-parallel ranks each. With parallel.dp_host a
# step sends half the bytes between them, one rank's instead of two's; losses differ only by rounding.
set -eu
netns_run=$1 tandem=$2 config=$3
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cat >"$dir/rank.sh" <<'END'
#!/bin/sh
dir=$1
shift
sent() { cat /sys/class/net/eth0/statistics/tx_bytes; }
before=$(sent)
"$@" 2>"$dir/log-$OMPI_COMM_WORLD_RANK" >/dev/null || { cat "$dir/log-$OMPI_COMM_WORLD_RANK"; exit 1; }
echo $(($(sent) - before)) >"$dir/sent-$OMPI_COMM_WORLD_RANK"
END
chmod +x "$dir/rank.sh"

bytes_of() {  # HOST_RANKS: bytes that the first host sends in a run
  TANDEM_THREADS=1 "$netns_run" --hosts 2 --ranks 2 "$dir/rank.sh" "$dir" "$tandem" train "$config" \
    --out "$dir/$1" --set parallel.dp=4 parallel.dp_host="$1" train.batch=4 train.seq=16 \
    parallel.dp_bucket_mib=0.1 train.steps=12 >"$dir/mpirun" 2>&1 || {
    status=$?
    cat "$dir/mpirun" >&2
    exit "$status"
  }
  cat "$dir/sent-0"
}
flat=$(bytes_of 0)
by_host=$(bytes_of 2)
echo "12 steps and their start: $flat bytes flat, $by_host by host"
[ $((by_host * 100)) -gt $((flat * 45)) ] && [ $((by_host * 100)) -lt $((flat * 55)) ] || {
  echo "expected half"
  exit 1
}
python3 - "$dir/0/metrics.jsonl" "$dir/2/metrics.jsonl" <<'END'
import json, math, sys
flat, by_host = ([json.loads(line)["loss"] for line in open(path)] for path in sys.argv[1:])
assert len(flat) == len(by_host) == 12 and flat != by_host, "expected 12 steps, summed in another order"
assert all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(flat, by_host)), (flat, by_host)
END
