#!/usr/bin/env bash
# check_isas.sh [BUILD [MARCH]]: the suites of arithmetic under each instruction set of oneDNN that this
# processor has, by the programs in BUILD (default: build) and by ones compiled for MARCH (default:
# x86-64-v3) in BUILD-MARCH, there without the suites that need the program tandem or training, for
# a shorter build, or not at all for MARCH none. Builds what is missing. Prints a line a combination;
# exit 1 if one fails.
#
# CHECK_ISAS    instruction sets to run (default: all below; the others are said to be left out)
# CHECK_SUITES  ctest's names of suites
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
build=${1:-build} march=${2:-x86-64-v3}
suites=${CHECK_SUITES:-core_test kernels_test gemm_test infer_test train_messages_test bench_generate}
isas=${CHECK_ISAS:-SSE41 AVX2 AVX512_CORE AVX512_CORE_VNNI AVX512_CORE_BF16 AVX512_CORE_AMX}
jobs=$(nproc)
status=0

flags=" $(sed -n 's/^flags[^:]*: //p;T;q' /proc/cpuinfo) "
# Processor flags that an instruction set, or a level of x86-64, needs.
needs() {
  case $1 in
    SSE41) echo sse4_1 ;;
    AVX2 | x86-64-v3) echo avx2 fma ;;
    AVX512_CORE | x86-64-v4) echo avx512f avx512bw avx512dq avx512vl ;;
    AVX512_CORE_VNNI) echo "$(needs AVX512_CORE) avx512_vnni" ;;
    AVX512_CORE_BF16) echo "$(needs AVX512_CORE_VNNI) avx512_bf16" ;;
    AVX512_CORE_AMX) echo "$(needs AVX512_CORE_BF16) amx_tile amx_bf16 amx_int8" ;;
    none) ;;
    *) echo "check_isas: $1: expected none, x86-64-v3, x86-64-v4 or an instruction set that is listed above" >&2 && exit 2 ;;
  esac
}
for name in "$march" $isas; do needs "$name" >/dev/null || exit; done
has() {
  local flag
  for flag in $(needs "$1"); do [[ $flags == *" $flag "* ]] || return 1; done
}

# run BUILD NAME SUITES: under every instruction set.
run() {
  local isa began log=$1/check_isas.log
  for isa in $isas; do
    if ! has "$isa"; then
      printf '%-10s %-17s not on this processor\n' "$2" "$isa"
      continue
    fi
    began=$SECONDS
    if DNNL_MAX_CPU_ISA=$isa ctest --test-dir "$1" -j "$jobs" --no-tests=error --output-on-failure \
      -R "^(${3// /|})\$" >"$log" 2>&1; then
      printf '%-10s %-17s passes, %d s\n' "$2" "$isa" $((SECONDS - began))
    else
      printf '%-10s %-17s FAILS, %d s:\n' "$2" "$isa" $((SECONDS - began))
      grep -E '^(\[  FAILED  \]|.*(Failure|\(Failed\)|\(Timeout\)|Not Run|No tests))' "$log" | sort -u | head -20
      status=1
    fi
  done
}

# make_suites BUILD SUITES OPTIONS...
make_suites() {
  local folder=$1 began=$SECONDS suite targets=()
  for suite in $2; do
    case $suite in
      core_test) targets+=(bin/core_tests) ;;
      train_messages_test) targets+=(bin/train_unit_tests) ;;
      *_test) targets+=("bin/$suite") ;;
      *) targets+=(bin/tandem) ;;
    esac
  done
  shift 2
  if { [ -e "$folder/build.ninja" ] || cmake -G Ninja -B "$folder" -DTANDEM_UNITY=ON -DTANDEM_BENCH=OFF \
    --log-level=WARNING "$@" >"$folder.log" 2>&1; } && ninja -C "$folder" "${targets[@]}" >"$folder.log" 2>&1; then
    rm -f "$folder.log"
    echo "$folder: built in $((SECONDS - began)) s"
  else
    tail -20 "$folder.log"
    return 1
  fi
}

make_suites "$build" "$suites" || exit 1
run "$build" native "$suites"
if [ "$march" = none ]; then
  :
elif has "$march"; then
  library=$(tr ' ' '\n' <<<"$suites" | grep '_test$' | grep -v '^train_' | paste -sd ' ')
  make_suites "$build-$march" "$library" -DTANDEM_NATIVE=OFF -DTANDEM_MARCH="$march" || exit 1
  run "$build-$march" "$march" "$library"
else
  echo "$march: not on this processor"
fi
exit "$status"
