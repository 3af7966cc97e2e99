#!/usr/bin/env bash
# tandem-ranks NODES NODE RANKS COMMAND...: starts the RANKS processes of one of NODES nodes, number NODE from 0, each
# with torchrun's variables. Needs MASTER_ADDR, node 0's address, and between nodes TANDEM_SECRET, the same on all. A
# process that fails ends the others, and its exit code is that of all: of those that fail within .1 s, the lowest's.
# Signals to stop are passed on.
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
# Signals are counted here and passed on below: each once, and no rank is started after one.
came=0 sent=0 code=0 pids=()
trap 'came=$((came + 1))' TERM INT HUP
# A headless Service knows the name of pod 0 only once the pod has started; ranks do not wait for names.
if [ "$nodes" -gt 1 ] && command -v getent >/dev/null; then
  note="tandem-ranks: waiting for the address of MASTER_ADDR $MASTER_ADDR, at most 300 s"
  until getent ahosts "$MASTER_ADDR" >/dev/null || [ "$came" != 0 ]; do
    [ -z "$note" ] || echo "$note" >&2
    note=
    [ $SECONDS -lt 300 ] || { echo "tandem-ranks: MASTER_ADDR $MASTER_ADDR: no such host" >&2; exit 2; }
    sleep 1
  done
fi
for ((local = 0; local < ranks && came == 0; ++local)); do
  RANK=$((node * ranks + local)) LOCAL_RANK=$local "$@" &
  pids+=($!)
done
[ "${#pids[@]}" -gt 0 ] || exit 143
# By number: `wait -n` may collect one of two that ended. A signal ends a `wait` early, which is repeated then.
status_of() {
  local before
  until before=$came; wait "$1"; status=$?; [ "$before" = "$came" ]; do :; done
}
while [ "${#pids[@]}" -gt 0 ]; do
  if [ "$sent" -lt "$came" ]; then
    sent=$came
    kill -TERM "${pids[@]}" 2>/dev/null
  fi
  running=()
  for pid in "${pids[@]}"; do
    if kill -0 "$pid" 2>/dev/null; then
      running+=("$pid")
      continue
    fi
    status_of "$pid"
    [ "$code" != 0 ] || code=$status
  done
  pids=("${running[@]}")
  [ "${#pids[@]}" -gt 0 ] || break
  if [ "$code" != 0 ] && [ "$came" = 0 ]; then
    sleep 1  # for the others' own lines; ranks that are told to stop already are not told again
    [ "$came" != 0 ] || came=1
  else
    sleep 0.1
  fi
done
exit "$code"
