#!/usr/bin/env bash
# fuzz.sh [TARGET [SECONDS]]: fuzzes with clang's libFuzzer under AddressSanitizer and UBSan.
# Targets: tests/fuzz/*_fuzz.cc, by default each for 60 s. New inputs are stored in
# build-fuzz/corpus/.
set -eu
cd "$(dirname "$0")/.."
seconds=${2:-60}
targets=${1:-$(basename -a -s _fuzz.cc tests/fuzz/*_fuzz.cc)}
command -v clang++ >/dev/null || {
  echo "fuzz: clang++ is not installed (Debian: clang); the same targets run without it in make test" >&2
  exit 4
}
cmake -S . -B build-fuzz -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo \
  -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++ \
  -DTANDEM_SANITIZE=address,undefined,fuzzer-no-link -DTANDEM_MPI=OFF -DTANDEM_BENCH=OFF \
  -DTANDEM_TRAINING=OFF \
  --log-level=WARNING >/dev/null
for target in $targets; do
  cmake --build build-fuzz --target "${target}_fuzz" -j "$(nproc)"
  mkdir -p "build-fuzz/corpus/$target"
  (cd build-fuzz && "bin/${target}_fuzz" -max_total_time="$seconds" -max_len=4096 \
    "corpus/$target" "../tests/fuzz/corpus/$target")
done
