#!/usr/bin/env bash
# gpu_check.sh BIN OUT [REPEATS]: the GPU tests and the benchmark cases of docs/gpu.md on this
# machine, from programs built elsewhere with the same libraries. Logs and JSON go to OUT.
set -u
bin=$1 out=$2 repeats=${3:-30}
mkdir -p "$out"
export NCCL_NVLS_ENABLE=0 TANDEM_DEADLINE_S=${TANDEM_DEADLINE_S:-30}
# Where Python wheels brought the CUDA libraries instead of a toolkit.
wheels=$(python3 -c 'import glob, nvidia
print(":".join(d for p in nvidia.__path__ for d in glob.glob(p + "/*/lib")))' 2>/dev/null || true)
export LD_LIBRARY_PATH=$bin/lib:$wheels:${LD_LIBRARY_PATH:-}
gpus=$(nvidia-smi -L | wc -l)
failed=0
if [ "${GPU_TESTS:-1}" = 1 ]; then
  timeout "${GPU_TEST_SECONDS:-200}" "$bin/gpu_test" --gtest_brief=0 >"$out/gpu_test.log" 2>&1 || failed=1
  grep -E "FAILED|PASSED|Failure|error" "$out/gpu_test.log" | head -40
fi
bench() {
  local name=$1
  shift
  timeout "${GPU_BENCH_SECONDS:-150}" "$bin/tandem_gpu_bench" "$gpus" "$repeats" "$out/$name.json" "$@" \
    2>&1 | tee -a "$out/bench.log"
  [ "${PIPESTATUS[0]}" = 0 ] || { failed=1; echo "$name: failed"; }
}
cases() {
  local op=$1 sizes=$2 m
  shift 2
  for nk in "$@"; do for m in $sizes; do echo "$op:${m}x$nk"; done; done
}
for op in ${GPU_OPS:-all_reduce gemm_ar ag_gemm gemm_rs}; do
  case $op in
    all_reduce) bench all_reduce all_reduce:16384 all_reduce:65536 all_reduce:262144 all_reduce:1048576 \
      all_reduce:4194304 all_reduce:16777216 all_reduce:67108864 all_reduce:268435456 ;;
    gemm_ar) bench gemm_ar $(cases gemm_ar "${GPU_AR_M:-1 8 16 64 128 256}" 8192x8192 8192x28672) ;;
    ag_gemm) bench ag_gemm $(cases ag_gemm "${GPU_M:-64 512 1024 2048 4096 8192 16384}" 10240x8192 57344x8192 49152x12288) ;;
    gemm_rs) bench gemm_rs $(cases gemm_rs "${GPU_M:-64 512 1024 2048 4096 8192 16384}" 8192x8192 8192x28672 12288x49152) ;;
  esac
done
exit $failed
