#!/usr/bin/env bash
# setup_torch.sh: fetches PyTorch (torch_test.txt; 3 GB, as its CPU needs the CUDA libraries that it is
# linked to) and frameworks on it (torch_frameworks_test.txt) into .deps/python-torch, for
# `make test-torch`. Without PyTorch the tests of tandem.torch.enable() are skipped, without a framework its own.
set -eu
tools=$(cd "$(dirname "$0")" && pwd)
deps=$tools/../.deps
python=/usr/bin/python3  # as in tools/setup_python.sh
[ -x "$python" ] || python=python3
wanted=$(cat "$tools/torch_test.txt" "$tools/torch_frameworks_test.txt" && "$python" -V)
[ "$(cat "$deps/python-torch/wanted" 2>/dev/null)" != "$wanted" ] || exit 0

fetch() {
  "$python" -m pip install --only-binary :all: --target "$deps/python-torch" --disable-pip-version-check --no-cache-dir \
    --upgrade -q "$@" >>"$deps/pip.log" 2>&1
}

mkdir -p "$deps"
: >"$deps/pip.log"
echo "setup: will fetch PyTorch and frameworks on it (tests, 3 GB) into .deps/"
rm -rf "$deps/python-torch"
if ! fetch -r "$tools/torch_test.txt"; then
  tail -n 1 "$deps/pip.log" >&2
  echo "setup: pip could not fetch PyTorch: the tests of tandem.torch.enable() are skipped" >&2
  rm -rf "$deps/python-torch"
  exit 0
fi
while read -r package; do
  fetch --no-deps "$package" || echo "setup: pip could not fetch $package: tests with it are skipped" >&2
done <"$tools/torch_frameworks_test.txt"
echo "$wanted" >"$deps/python-torch/wanted"
