#!/usr/bin/env bash
# setup_python.sh: nanobind, pinned, into .deps/: Debian 12 has none. Where it cannot be had, the Python
# package is left out and its tests say so.
set -eu
version=2.9.2
hash=c37957ffd5eac7eda349cff3622ecd32e5ee1244ecc912c99b5bc8188bafd16e
deps=$(cd "$(dirname "$0")/.." && pwd)/.deps
[ ! -f "$deps/nanobind/nanobind/cmake/nanobind-config.cmake" ] || exit 0
echo "setup: will fetch nanobind $version (binds C++ to Python) into .deps/"
mkdir -p "$deps"
wheel=$deps/nanobind-$version-py3-none-any.whl
printf 'nanobind==%s --hash=sha256:%s\n' "$version" "$hash" >"$deps/nanobind.txt"
if ! python3 -m pip download -q --disable-pip-version-check --no-deps --no-cache-dir -d "$deps" \
  --require-hashes -r "$deps/nanobind.txt" >"$deps/pip.log" 2>&1; then
  tail -n 1 "$deps/pip.log" >&2
  echo "setup: pip could not fetch nanobind $version: the Python package is left out" >&2
  exit 0
fi
rm -rf "$deps/nanobind"
python3 -m zipfile -e "$wheel" "$deps/nanobind"
