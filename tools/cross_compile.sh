#!/usr/bin/env bash
# cross_compile.sh [TRIPLET]: compiles every source of the library and the program for another
# architecture (default: aarch64-linux-gnu) with Debian's cross compiler, to show that nothing
# outside kernels assumes x86. Nothing is linked: the target's libraries are not installed, and of
# the host's only the headers are used.
set -eu
cd "$(dirname "$0")/.."
triplet=${1:-aarch64-linux-gnu}
command -v "$triplet-g++" >/dev/null || {
  echo "cross_compile: $triplet-g++ is not installed (Debian: g++-$triplet)" >&2
  exit 77
}
here=/usr/lib/$(gcc -print-multiarch)
build=build-$triplet log=$PWD/build-$triplet/compile.log
mkdir -p "$build"
cmake -G Ninja -S . -B "$build" --log-level=WARNING -DCMAKE_SYSTEM_NAME=Linux \
  -DCMAKE_SYSTEM_PROCESSOR="${triplet%%-*}" -DCMAKE_CXX_COMPILER="$triplet-g++" \
  -Dfmt_DIR="$here/cmake/fmt" -Dspdlog_DIR="$here/cmake/spdlog" -Ddnnl_DIR="$here/cmake/dnnl" \
  -DCMAKE_LIBRARY_PATH="$here" -DTANDEM_MPI=OFF \
  -DCMAKE_TRY_COMPILE_TARGET_TYPE=STATIC_LIBRARY -DTANDEM_NATIVE=OFF -DTANDEM_TESTS=OFF \
  -DTANDEM_BENCH=OFF -DTANDEM_UNITY=ON >"$log" 2>&1 || { tail -n 20 "$log"; exit 1; }
objects=$(ninja -C "$build" -t targets all | sed -n 's/^\(.*\.cc\.o\): CXX_COMPILER.*/\1/p')
start=$SECONDS
# shellcheck disable=SC2086
ninja -C "$build" $objects >>"$log" 2>&1 || { grep -E 'error|FAILED' "$log" | head -n 20; exit 1; }
echo "$triplet: $(wc -w <<<"$objects") objects compiled in $((SECONDS - start)) s"
