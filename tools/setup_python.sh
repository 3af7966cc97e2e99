#!/usr/bin/env bash
# setup_python.sh: fetches the Python package's requirements that Debian lacks, pinned, into .deps/:
# nanobind, which binds C++ to Python, and for tests JAX, pyperf, tokenizers and sentencepiece
# (tools/python_test.txt).
# Without nanobind the package is omitted; without the others their tests are; both cases are
# reported.
set -eu
tools=$(cd "$(dirname "$0")" && pwd)
deps=$tools/../.deps
python=/usr/bin/python3  # as in python/CMakeLists.txt: it has Debian's NumPy and PyTorch
[ -x "$python" ] || python=python3
version=2.9.2
hash=c37957ffd5eac7eda349cff3622ecd32e5ee1244ecc912c99b5bc8188bafd16e

pip() { "$python" -m pip "$@" --disable-pip-version-check --no-cache-dir -q >>"$deps/pip.log" 2>&1; }

nanobind() {
  [ ! -f "$deps/nanobind/nanobind/cmake/nanobind-config.cmake" ] || return 0
  echo "setup: will fetch nanobind $version (binds C++ to Python) into .deps/"
  printf 'nanobind==%s --hash=sha256:%s\n' "$version" "$hash" >"$deps/nanobind.txt"
  if ! pip download --no-deps -d "$deps" --require-hashes -r "$deps/nanobind.txt"; then
    tail -n 1 "$deps/pip.log" >&2
    echo "setup: pip could not fetch nanobind $version: the Python package is left out" >&2
    exit 0
  fi
  rm -rf "$deps/nanobind"
  python3 -m zipfile -e "$deps/nanobind-$version-py3-none-any.whl" "$deps/nanobind"
}

tests() {
  local wanted
  wanted=$(cat "$tools/python_test.txt" && "$python" -V)
  [ "$(cat "$deps/python-test/wanted" 2>/dev/null)" != "$wanted" ] || return 0
  echo "setup: will fetch JAX, pyperf, tokenizers and sentencepiece (tests, 95 MB) into .deps/"
  rm -rf "$deps/python-test"
  if ! pip install --no-deps --only-binary :all: --target "$deps/python-test" --require-hashes \
    -r "$tools/python_test.txt"; then
    tail -n 1 "$deps/pip.log" >&2
    echo "setup: pip could not fetch JAX, pyperf, tokenizers and sentencepiece: tests with them are skipped" >&2
    rm -rf "$deps/python-test"
    return 0
  fi
  echo "$wanted" >"$deps/python-test/wanted"
}

mkdir -p "$deps"
: >"$deps/pip.log"
nanobind
tests
