#!/usr/bin/env bash
# netns_bench.sh [--tandem PROGRAM] [--out DIR] [--ops "OP..."] [--shapes "SHAPE..."] [--bytes SIZES]
#                [--dtype f32|bf16] [--codec "FORMAT..."] [--imbalance X] [--backward] [--repeats N]
#                [NETNS_RUN OPTION...]
#
# `tandem bench` on a real network of two hosts (see netns_run.sh), one compute thread per rank:
#   ag_gemm gemm_rs     shapes MxNxK are AG+GEMM's; GEMM+RS swaps N and K, so that both send the same
#                       bytes and do the same work (the default ops)
#   moe moe_dispatch_gemm moe_gemm_combine
#                       shapes MODEL:DIVISOR:TOKENS: a published layer, the divisor of its widths, and
#                       tokens over both hosts; with --imbalance X, or --backward (moe)
#   prefill             shapes MxNxKxLAYERS: tokens, MLP width, hidden features: time to first token
#   all_reduce all_gather reduce_scatter all_to_all broadcast
#                       --bytes as in tandem bench, 1M:64M by default; not compared with MPI's own, whose
#                       calls of some MB hang unless other MPI calls follow (Open MPI 4.1.4)
# With --codec each is timed once per format, next to its uncompressed candidates. Default shapes
# compute at least as long as the link needs for their bytes, on a core of about 140 GFLOP/s, except
# for prefill, whose smaller shapes show the savings of a codec. Results are written to
# DIR/<op>-<shape>[-<dtype>][-imbalance<X>][-backward][-<format>].json, by default bench/results/netns-<rate>,
# with the suffix -moe, -prefill or -collectives for MoE, prefill and collectives. Exit status 77 if
# this machine cannot create such hosts. Both hosts' network stacks run on the processor that
# computes, so measure on an idle machine.
set -eu

here=$(cd "$(dirname "$0")/.." && pwd)
usage() { sed -n '2,24s/^# \?//p' "$0" >&2; exit 2; }
refuse() { echo "netns_bench.sh: $1" >&2; exit 2; }
tandem=build/bin/tandem out='' rate=1gbit repeats=25 ops="ag_gemm gemm_rs" shapes='' bytes='' dtype=f32 codecs=none
imbalance='' backward=''
network=()
while [ $# -gt 0 ]; do
  case $1 in
    --backward) backward=1; shift; continue ;;
  esac
  [ $# -gt 1 ] || usage
  case $1 in
    --tandem) tandem=$(realpath "$2") ;;
    --out) out=$2 ;;
    --ops) ops=$2 ;;
    --shapes) shapes=$2 ;;
    --bytes) bytes=$2 ;;
    --dtype) dtype=$2 ;;
    --codec) codecs=$2 ;;
    --imbalance) imbalance=$2 ;;
    --repeats) repeats=$2 ;;
    --rate) rate=$2 network+=("$1" "$2") ;;
    --hosts | --delay | --mtu | --congestion | --burst) network+=("$1" "$2") ;;
    *) usage ;;
  esac
  shift 2
done

kind_of() {  # OP
  case $1 in
    ag_gemm | gemm_rs) echo dense ;;
    moe | moe_dispatch_gemm | moe_gemm_combine) echo moe ;;
    prefill) echo prefill ;;
    all_reduce | all_gather | reduce_scatter | all_to_all | broadcast) echo collectives ;;
    *) refuse "--ops $1: expected ag_gemm, gemm_rs, moe, moe_dispatch_gemm, moe_gemm_combine, prefill or a collective" ;;
  esac
}
kinds=$(for op in $ops; do kind_of "$op" || exit 2; done) || exit 2
kinds=$(sort -u <<< "$kinds" | xargs)
case $kinds in
  *" "*)
    [ -z "$shapes" ] || refuse "--shapes $shapes with --ops of several kinds ($kinds): expected one kind, whose shapes they are"
    [ -z "$out" ] || refuse "--out $out with --ops of several kinds ($kinds): expected one kind, as a folder is one table" ;;
esac
has() { [[ " $kinds " == *" $1 "* ]]; }
[ -z "$imbalance$backward" ] || [ "$kinds" = moe ] || refuse "--imbalance or --backward with $kinds: expected moe"
[ -z "$bytes" ] || has collectives || refuse "--bytes $bytes with $kinds: expected collectives"
[ -z "$shapes" ] || [ "$kinds" != collectives ] || refuse "--shapes $shapes with collectives: expected --bytes"

shapes_of() {  # KIND
  if [ -n "$shapes" ]; then echo "$shapes"; return; fi
  case $1-$rate in
    dense-*gbit) echo 2048x4096x2048 2048x6144x2048 2048x8192x2048 ;;
    dense-500mbit) echo 2048x6144x2048 2048x8192x2048 ;;
    dense-*) echo 1024x16384x2048 1024x20480x2048 ;;
    moe-*gbit | moe-500mbit) echo mixtral-8x7b:4:2048 mixtral-8x7b:3:2048 ;;
    moe-*) echo mixtral-8x7b:2:1024 mixtral-8x7b:2:2048 ;;
    prefill-*gbit) echo 1024x704x256x4 1024x1408x512x4 1024x2816x1024x4 ;;
    prefill-*) echo 512x2816x1024x4 512x5632x2048x4 ;;
    collectives-*) echo "${bytes:-1M:64M}" ;;
  esac
}

[ -z "$out" ] || out=$(realpath -m "$out")
cd "$here"  # so that the command in a result has no path of this machine
export TANDEM_THREADS=1

timed() {  # OP NAME ARG...: once per format
  local op=$1 name=$2 codec file with folder
  shift 2
  folder=$(kind_of "$op")
  folder=${out:-bench/results/netns-$rate$([ "$folder" = dense ] || echo "-$folder")}
  folder=${folder#"$here"/}
  mkdir -p "$folder"
  for codec in $codecs; do
    with=() file=$op-$name
    [ "$dtype" = f32 ] || file+=-$dtype
    [ -z "$imbalance" ] || file+=-imbalance$imbalance
    [ -z "$backward" ] || file+=-backward
    if [ "$codec" != none ]; then
      with=(--codec "$codec") file+=-${codec//:/-}
    fi
    echo "${file//-/ }:"
    "$here/tools/netns_run.sh" "${network[@]}" "$tandem" bench "$op" "$@" "${with[@]}" --dtype "$dtype" \
      --repeats "$repeats" --json "$folder/$file.json"
  done
}

for op in $ops; do
  kind=$(kind_of "$op")
  for shape in $(shapes_of "$kind"); do
    case $kind in
      dense)
        IFS=x read -r m n k <<< "$shape"
        [ "$op" = ag_gemm ] || read -r n k <<< "$k $n"
        timed "$op" "${m}x${n}x$k" --m "$m" --n "$n" --k "$k" ;;
      moe)
        IFS=: read -r model scale tokens <<< "$shape"
        timed "$op" "$model-$scale-$tokens" --model "$model" --hidden-scale "$scale" --tokens "$tokens" --ep 2 \
          ${imbalance:+--imbalance "$imbalance"} ${backward:+--backward} ;;
      prefill)
        IFS=x read -r m n k layers <<< "$shape"
        timed "$op" "$shape" --m "$m" --n "$n" --k "$k" --layers "$layers" ;;
      collectives)
        timed "$op" "${shape//:/-}" --bytes "$shape" --no-library ;;
    esac
  done
done
