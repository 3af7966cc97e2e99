#!/usr/bin/env bash
# tandem-ranks NODES NODE RANKS COMMAND...: starts the RANKS processes of one of NODES nodes, number NODE from 0, each
# with torchrun's variables. Needs MASTER_ADDR, node 0's address, and between nodes TANDEM_SECRET, the same on all. The
# first process that fails ends the others, and its exit code is that of all; signals to stop are passed on.
set -u
if [ $# -lt 4 ]; then
  echo "usage: tandem-ranks NODES NODE RANKS COMMAND..." >&2
  exit 2
fi
nodes=$1 node=$2 ranks=$3
shift 3
for number in "$nodes" "$node" "$ranks"; do
  [[ $number =~ ^[0-9]+$ ]] || { echo "tandem-ranks: $number: expected a number" >&2; exit 2; }
done
if [ "$node" -ge "$nodes" ] || [ "$ranks" -lt 1 ]; then
  echo "tandem-ranks: node $node of $nodes with $ranks ranks: expected a node from 0 to $((nodes - 1)), and ranks" >&2
  exit 2
fi
export WORLD_SIZE=$((nodes * ranks)) LOCAL_WORLD_SIZE=$ranks MASTER_ADDR=${MASTER_ADDR:-127.0.0.1} MASTER_PORT=${MASTER_PORT:-29500}
pids=()
for ((local = 0; local < ranks; ++local)); do
  RANK=$((node * ranks + local)) LOCAL_RANK=$local "$@" &
  pids+=($!)
done
trap 'kill -TERM "${pids[@]}" 2>/dev/null' TERM INT HUP
code=0
for ((left = ranks; left > 0;)); do
  wait -n
  status=$?
  # After a signal `wait` returns though no process has ended.
  running=$(jobs -pr | wc -l)
  [ "$running" -lt "$left" ] || continue
  left=$running
  if [ "$status" != 0 ] && [ "$code" = 0 ]; then
    code=$status
    sleep 1  # for the others' own lines
    kill -TERM "${pids[@]}" 2>/dev/null
  fi
done
exit "$code"
