#!/usr/bin/env bash
# placement_test.sh SOURCE SCRATCH CXX: the lists of sources do not depend on the location or name of a
# clone's folder. Configures only; with nvcc also with CUDA.
set -eu
source=$1 scratch=$2 cxx=$3
rm -rf "$scratch"
mkdir -p "$scratch"

# sources BUILD: compiled files, relative to the clone.
sources() {
  sed -n 's|^ *"file": "\(.*\)",*$|\1|p' "$1/compile_commands.json" | sed "s|^$2/||" | sort
}

kinds=cpu
if command -v nvcc >/dev/null && [ -d "$source/.deps/cutlass" ]; then kinds="cpu cuda"; fi
for kind in $kinds; do
  for place in here cuda/sm90/src/train/bench/cli/no_cuda; do
    clone=$scratch/$kind/$place/tandem
    mkdir -p "$clone"
    tar -C "$source" --exclude=.git --exclude='build*' --exclude=out -cf - CMakeLists.txt CMakePresets.json \
      bench cmake examples include python src tests | tar -C "$clone" -xf -
    ln -s "$source/.deps" "$clone/.deps"
    flags=(-DTANDEM_BENCH=OFF -DTANDEM_TESTS=OFF)
    [ "$kind" = cuda ] && flags+=(-DTANDEM_CUDA=ON)
    cmake -S "$clone" -B "$clone/build" -G Ninja -DCMAKE_CXX_COMPILER="$cxx" "${flags[@]}" >"$clone/log" 2>&1 ||
      { cat "$clone/log"; exit 1; }
    sources "$clone/build" "$clone" >"$scratch/$kind-$(basename "$place")"
    if [ "$place" != here ]; then
      diff "$scratch/$kind-here" "$scratch/$kind-$(basename "$place")"
    fi
  done
  if [ "$(wc -l <"$scratch/$kind-here")" -lt 100 ]; then
    echo "$kind: only $(wc -l <"$scratch/$kind-here") sources" >&2
    exit 1
  fi
done
