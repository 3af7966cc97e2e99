#!/usr/bin/env bash
# python_asan.sh [TEST...]: tests of the Python package (default: invalid calls and errors) with the
# library under AddressSanitizer and UBSan, in build-python-asan. TANDEM_TEST_FUZZ=100000 makes as
# many invalid calls. Run after tools/setup.sh test and tools/setup_python.sh.
set -eu
cd "$(dirname "$0")/.."
build=build-python-asan
[ $# -gt 0 ] || set -- fuzz_test errors_test
cmake --preset asan -B "$build" -DTANDEM_UNITY=ON -DTANDEM_TESTS=OFF -DTANDEM_PYTHON=ON --log-level=WARNING >/dev/null
cmake --build "$build" -j "${JOBS:-$(nproc)}" --target _core
python=$(sed -n "s/^_Python_EXECUTABLE:INTERNAL=//p" "$build/CMakeCache.txt")
# The sanitizer's runtime must load first, and at its start looks up C++ exception functions.
# Python's own pools hide what it frees, and memory that it keeps to the end is no leak of ours.
cd tests/python
LD_PRELOAD=$(g++ -print-file-name=libasan.so):$(g++ -print-file-name=libstdc++.so) \
  ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \
  UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 PYTHONMALLOC=malloc \
  PYTHONPATH=../../$build/python:../../.deps/python-test PYTHONDONTWRITEBYTECODE=1 TANDEM_TUNE=0 \
  TANDEM_CACHE_DIR=../../$build TANDEM_DEADLINE_S=60 "$python" -m unittest "$@"
