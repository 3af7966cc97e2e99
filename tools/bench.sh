#!/usr/bin/env bash
# bench.sh BIN OUT: micro-benchmarks of the operators against bare oneDNN, then serial against
# overlapped on an emulated link; tables on the terminal, JSON in OUT.
set -eu
bin=$1
out=$2
mkdir -p "$out"
# Random order and repetitions, since a machine's speed drifts.
"$bin/operators_bench" --benchmark_repetitions=9 --benchmark_enable_random_interleaving=true \
  --benchmark_min_time=0.05 --benchmark_report_aggregates_only=false \
  --benchmark_display_aggregates_only=true --benchmark_out="$out/operators.json" --benchmark_out_format=json
for op in ag_gemm gemm_rs gemm_ar ag_wgrad; do
  "$bin/tandem" bench "$op" --ranks 2 --m 512 1024 2048 --n 2048 --k 2048 --link 150MB/s,20us \
    --json "$out/$op.json"
done
