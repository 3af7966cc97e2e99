#!/usr/bin/env bash
# several_hosts_test.sh NETNS_RUN TANDEM CONFIG: the same job with torchrun's variables, with srun's in two concurrent
# steps of one Slurm job, and by `tandem launch --hosts`, also if a host is killed or its link is cut, ends with
# the bits of a run on threads. Hosts are network namespaces.
set -eu
if [ "$1" != here ]; then
  exec "$1" --hosts 3 --once "$0" here "$2" "$3"
fi
tandem=$2 config=$3
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
export TANDEM_THREADS=1 TANDEM_CACHE_DIR=$dir/cache TANDEM_TUNE=0
job=("$tandem" train "$config" --tp 2 --dp 2 --set model.hidden=16 model.layers=1 model.head_dim=4 model.ffn=32
  train.seq=32 train.batch=8 train.steps=200 checkpoint.snapshot_every=8 checkpoint.peer_copy=true)
fail() {
  printf '%s\n' "$1" >&2
  shift
  [ $# = 0 ] || cat "$@" >&2
  exit 1
}
same() { cmp "$dir/threads/final/model.safetensors" "$dir/$1/final/model.safetensors" || fail "$1 differs" "$dir/$1.log"; }
ranks() { # NAME VARIABLES: rank R of four, two on each of two hosts; VARIABLES is evaluated for each
  local rank host pids=()
  for rank in 0 1 2 3; do
    host=$((rank / 2)) local_rank=$((rank % 2))
    "$NETNS_SHELL" 10.77.0.$((host + 1)) "$(eval "echo \"$2\"") TANDEM_SECRET=of_these_tests_16_bytes_and_more exec \
      $(printf '%q ' "${job[@]}" --out "$dir/$1")" >"$dir/$1.$rank.log" 2>&1 &
    pids+=($!)
  done
  for rank in 0 1 2 3; do wait "${pids[rank]}" || fail "$1: rank $rank" "$dir/$1.$rank.log"; done
}
"${job[@]}" --out "$dir/threads" >"$dir/threads.log" 2>&1 || fail threads "$dir/threads.log"
ranks torchrun 'RANK=$rank WORLD_SIZE=4 LOCAL_RANK=$local_rank LOCAL_WORLD_SIZE=2 MASTER_ADDR=10.77.0.1 MASTER_PORT=29500'
same torchrun
for step in 0 1; do
  ranks srun$step "SLURM_PROCID=\$rank SLURM_STEP_NUM_TASKS=4 SLURM_LOCALID=\$local_rank SLURM_NODEID=\$host \
    SLURM_STEP_NODELIST=10.77.0.[1-2] SLURM_STEP_TASKS_PER_NODE='2(x2)' SLURM_JOB_ID=77 SLURM_STEP_ID=$step" &
  steps[step]=$!
done
for step in 0 1; do
  wait "${steps[step]}" || exit 1
  same srun$step
done

printf '10.77.0.1 slots=2\n10.77.0.2 slots=2\n10.77.0.3 slots=0\n' >"$dir/hosts"
launch() { # NAME: with spares, in the background
  "$tandem" launch --hosts "$dir/hosts" --remote-shell "$NETNS_SHELL" --host-timeout 2 -n 4 --spares 2 -- "${job[@]}" \
    --out "$dir/$1" >"$dir/$1.log" 2>&1 &
  launcher=$!
  for _ in $(seq 1000); do
    [ "$(cat "$dir/$1/metrics.jsonl" 2>/dev/null | wc -l)" -lt 20 ] || return 0
    sleep 0.01
  done
  fail "$1: no step 20" "$dir/$1.log"
}
ends() { # NAME CAUSE: after the loss of two ranks
  wait "$launcher" || fail "$1: exit $?" "$dir/$1.log"
  [ "$(grep -c "rank [23] (process [0-9]* on 10.77.0.2) was lost with its host: $2 .* on 10.77.0.3 has taken its rank" \
    "$dir/$1.log")" = 2 ] || fail "$1: expected two lost ranks" "$dir/$1.log"
  same "$1"
}
launch killed
"$NETNS_SHELL" 10.77.0.2 'ip netns pids $(hostname) | grep -vx $$ | xargs kill -9' 2>/dev/null || true
ends killed 'its executor has ended'
launch cut
"$NETNS_SHELL" 10.77.0.2 'ip link set eth0 down'
ends cut 'no sign of life for 2 s'
