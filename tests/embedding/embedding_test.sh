#!/usr/bin/env bash
# embedding_test.sh SOURCE FOLDER CXX: the program of docs/start/tour.md in other projects: Tandem added as a folder, found
# by CMake and by pkg-config, static and shared. The sources are compiled once.
set -euo pipefail
source=$1 folder=$2
export CXX=$3 CMAKE_GENERATOR=Ninja
tests=$(cd "$(dirname "$0")" && pwd)
command -v ccache >/dev/null && export CMAKE_CXX_COMPILER_LAUNCHER=ccache
unset CXXFLAGS LDFLAGS PKG_CONFIG_PATH
rm -rf "$folder"
mkdir -p "$folder"/{subproject,package}

. "$tests/pages.sh"
for project in subproject package; do block cpp '^int main' >"$folder/$project/main.cc"; done
block cmake '^find_package.tandem' >"$folder/package/CMakeLists.txt"
cp "$tests/subproject/CMakeLists.txt" "$folder/subproject/"

run() {  # WAY PROGRAM
  local said
  said=$("$2") || { echo "$1: $said"; exit 1; }
  [[ $said == "Tandem "*": 0 wrong" ]] || { echo "$1: $said: expected 0 wrong"; exit 1; }
  echo "$1: $said"
}
configure() { cmake "$@" --log-level=WARNING -Wdev >/dev/null; }

for kind in static shared; do
  shared=$([ $kind = shared ] && echo ON || echo OFF)
  prefix=$folder/$kind
  configure -S "$folder/subproject" -B "$folder/subproject/build" -DTANDEM_SOURCE="$source" \
    -DTANDEM_UNITY=ON -DTANDEM_INSTALL=ON -DBUILD_SHARED_LIBS=$shared
  cmake --build "$folder/subproject/build" -j "${EMBEDDING_JOBS:-2}" >"$folder/log" ||
    { cat "$folder/log"; exit 1; }
  run "add_subdirectory, $kind" "$folder/subproject/build/app"
  cmake --install "$folder/subproject/build" --prefix "$prefix" >/dev/null
  [ -s "$prefix/share/tandem/shipped_tuner.json" ] || { echo "no shipped_tuner.json"; exit 1; }

  configure -S "$folder/package" -B "$folder/package/$kind" -DCMAKE_PREFIX_PATH="$prefix"
  cmake --build "$folder/package/$kind" >"$folder/log" || { cat "$folder/log"; exit 1; }
  run "find_package, $kind" "$folder/package/$kind/app"

  pc=$(dirname "$(find "$prefix" -name tandem.pc)")
  # shellcheck disable=SC2046
  $CXX -Wall -Wextra -Werror "$folder/package/main.cc" -o "$folder/pkg-config-$kind" \
    $(PKG_CONFIG_PATH=$pc pkg-config --cflags --libs tandem) -Wl,-rpath,"$(dirname "$pc")"
  run "pkg-config, $kind" "$folder/pkg-config-$kind"
done

# The shared library exports only symbols that the public headers declare.
library=$(find "$folder/shared" -name 'libtandem.so')
"$tests/exports_test.py" "$source/include/tandem" "$library"
