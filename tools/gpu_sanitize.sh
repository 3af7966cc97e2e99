#!/usr/bin/env bash
# gpu_sanitize.sh BIN OUT [TOOL...]: compute-sanitizer's memcheck and racecheck over our kernels on
# two GPUs (gpu_test's Sanitized suites; NCCL's kernels are not checked, nor cuBLAS's under
# memcheck). Writes a log per run to OUT; exit code 1 if any run found an error, failed or did not
# end within SANITIZE_SECONDS (240).
set -u
bin=$1 out=$2
shift 2
[ $# -gt 0 ] || set -- memcheck racecheck
sanitizer=${COMPUTE_SANITIZER:-$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)}
[ -x "$sanitizer" ] || { echo "compute-sanitizer: not found: expected on the PATH or in COMPUTE_SANITIZER" >&2; exit 1; }
mkdir -p "$out"
# No candidates are timed: that would run every kernel many times. Calls are not replayed as graphs,
# whose branches the tools may serialize.
export NCCL_NVLS_ENABLE=0 TANDEM_TUNE=0 TANDEM_GRAPHS=0 TANDEM_CACHE_DIR=$out/cache
wheels=$(python3 -c 'import glob, nvidia
print(":".join(d for p in nvidia.__path__ for d in glob.glob(p + "/*/lib")))' 2>/dev/null || true)
export LD_LIBRARY_PATH=$bin/lib:$wheels:${LD_LIBRARY_PATH:-}
failed=0
for tool in "$@"; do
  kernels="--kernel-name kernel_substring=tandem"
  # racecheck fails if it checks only some kernels of a search by cuBLASLt.
  [ "$tool" != racecheck ] || kernels="--kernel-name-exclude kernel_substring=nccl"
  for suite in Sanitized SanitizedFused; do
    log=$out/$tool-$suite.log begin=$SECONDS
    timeout "${SANITIZE_SECONDS:-240}" "$sanitizer" --tool "$tool" --error-exitcode 9 --print-limit 100000 \
      --report-api-errors no $kernels \
      "$bin/gpu_test" --gtest_filter="*/$suite.*" >"$log" 2>&1
    code=$?
    case $code in
      0) said=clean ;;
      9) said="found something" ;;
      124) said="did not end in time" ;;
      *) said="exit code $code" ;;
    esac
    # racecheck does not recognize the barriers of cuBLASLt's own kernels: hazards there are not
    # ours.
    if [ $tool = racecheck ] && [ $code = 9 ] && ! grep -q '^\[  FAILED' "$log" &&
      ! grep 'Race reported' "$log" | grep -qv 'nvjet\|cublas'; then
      code=0 said="clean but for hazards in cuBLASLt's own kernels"
    fi
    [ $code = 0 ] && ! grep -q "PASSED.* [1-9][0-9]* test" "$log" && { code=1 said="no test ran"; }
    [ $code = 0 ] || failed=1
    echo "$tool $suite: $said ($((SECONDS - begin)) s)$(grep -h -m1 'SUMMARY' "$log" | sed 's/^=*/,/')"
  done
done
exit $failed
