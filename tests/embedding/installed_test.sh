#!/usr/bin/env bash
# installed_test.sh SOURCE BUILD: the files that docs/start/ promises after `cmake --install`: the program, its
# command for a compiler without CMake, and its project for CMake.
set -euo pipefail
source=$1 build=$2
tests=$(cd "$(dirname "$0")" && pwd)
. "$tests/pages.sh"
HOME=$(mktemp -d)
export HOME LD_LIBRARY_PATH=$HOME/.local/lib
trap 'rm -rf "$HOME"' EXIT
unset PKG_CONFIG_PATH

install=$(line "make && cmake --install build")
[ -n "$install" ] || { echo "no command that installs in docs/start/install.md"; exit 1; }
cd "$build"
eval "${install/make && cmake --install build/cmake --install .}" >/dev/null
said=$("$HOME/.local/bin/tandem" --version)
[[ $said == *"$(sed -n 's/.*TANDEM_VERSION "\(.*\)"/\1/p' "$source/include/tandem/version.h")"* ]] ||
  { echo "tandem --version: $said"; exit 1; }

cd "$HOME"
block cpp '^int main' >main.cc
compile=$(inline "c++ main.cc")
[ -n "$compile" ] || { echo "no command for pkg-config in docs/start/install.md"; exit 1; }
eval "$compile"
said=$(./a.out)
[[ $said == "Tandem "*": 0 wrong" ]] || { echo "$compile: $said"; exit 1; }

block cmake '^find_package.tandem' >CMakeLists.txt
cmake -B build -DCMAKE_PREFIX_PATH="$HOME/.local" --log-level=WARNING >/dev/null
cmake --build build >log || { cat log; exit 1; }
said=$(build/app)
[[ $said == "Tandem "*": 0 wrong" ]] || { echo "find_package: $said"; exit 1; }
