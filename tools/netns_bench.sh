#!/usr/bin/env bash
# netns_bench.sh [--tandem PROGRAM] [--out DIR] [--ops "OP..."] [--shapes "MxNxK..."]
#                [--repeats N] [NETNS_RUN OPTION...]
#
# Serial against overlapped on a real network of two hosts (see netns_run.sh): AG+GEMM and GEMM+RS,
# one compute thread a rank. Of moe_dispatch_gemm and moe_gemm_combine, when --ops names them, a shape
# is MODEL:DIVISOR:TOKENS: a published layer, by what its widths are divided, and tokens over both
# hosts; results then go to bench/results/netns-<rate>-moe. Else shapes are AG+GEMM's; GEMM+RS swaps
# N and K, so that both send the same bytes and compute as much. The default shapes compute at least as long as the rate takes for
# their bytes, on a core of about 140 GFLOP/s. Results go to
# DIR/<op>-<m>x<n>x<k>.json, by default bench/results/netns-<rate>/. Exit status 77 when this
# machine cannot make such hosts. Both hosts' network stacks run on the processor that computes, so
# measure on an idle machine.
set -eu

here=$(cd "$(dirname "$0")/.." && pwd)
tandem=build/bin/tandem out= rate=1gbit repeats=25 ops="ag_gemm gemm_rs" shapes=
network=()
while [ $# -gt 0 ]; do
  case $1 in
    --tandem) tandem=$(realpath "$2") ;;
    --out) out=$2 ;;
    --ops) ops=$2 ;;
    --shapes) shapes=$2 moe_shapes=$2 ;;
    --repeats) repeats=$2 ;;
    --rate) rate=$2 network+=("$1" "$2") ;;
    --hosts | --delay | --mtu | --congestion | --burst) network+=("$1" "$2") ;;
    *) sed -n '2,15s/^# \?//p' "$0" >&2; exit 2 ;;
  esac
  shift 2
done
case $rate in
  *gbit) shapes=${shapes:-2048x4096x2048 2048x6144x2048 2048x8192x2048} ;;
  500mbit) shapes=${shapes:-2048x6144x2048 2048x8192x2048} ;;
  *) shapes=${shapes:-1024x16384x2048 1024x20480x2048} ;;
esac
moe_shapes=${moe_shapes:-mixtral-8x7b:4:2048 mixtral-8x7b:3:2048}
case $ops in *moe*) shapes=$moe_shapes out=${out:-bench/results/netns-$rate-moe} ;; esac
[ -z "$out" ] || out=$(realpath -m "$out")
cd "$here"  # so that the command in a result has no path of this machine
out=${out:-bench/results/netns-$rate}
out=${out#"$here"/}
mkdir -p "$out"
export TANDEM_THREADS=1

for op in $ops; do
  for shape in $shapes; do
    if [[ $op == moe* ]]; then
      IFS=: read -r model scale tokens <<< "$shape"
      echo "$op, $model / $scale, $tokens tokens:"
      "$here/tools/netns_run.sh" "${network[@]}" "$tandem" bench "$op" --model "$model" --hidden-scale "$scale" \
        --tokens "$tokens" --ep 2 --repeats "$repeats" --json "$out/$op-$model-$scale-$tokens.json"
      continue
    fi
    IFS=x read -r m n k <<< "$shape"
    [ "$op" = ag_gemm ] || read -r n k <<< "$k $n"
    echo "$op, $m x $n x $k:"
    "$here/tools/netns_run.sh" "${network[@]}" "$tandem" bench "$op" --m "$m" --n "$n" --k "$k" \
      --dtype f32 --repeats "$repeats" --json "$out/$op-${m}x${n}x$k.json"
  done
done
