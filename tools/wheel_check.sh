#!/usr/bin/env bash
# wheel_check.sh: installs each dist/*.whl that one of PYTHON (default: those of python3.11, 3.12,
# 3.13 that are installed) supports in an empty virtual environment with only NumPy, and runs an
# example with each x86-64 level inside that this processor supports. Needs python3-venv and, for
# NumPy, network. CUDA=1: each dist/cuda/*.whl, with cuBLASLt and NCCL from pip unless the system
# has them; a GPU rank runs, or is rejected if there is no GPU.
set -eu
cd "$(dirname "$0")/.."
dist=dist
extra=''
if [ "${CUDA:-0}" = 1 ]; then
  dist=dist/cuda
  extra='[cuda]'
fi
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
checked=0
for python in ${PYTHON:-python3.11 python3.12 python3.13}; do
  tag=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])' 2>/dev/null) || continue
  wheel=$(echo "$dist"/tandem-*-"$tag"-*.whl)
  [ -f "$wheel" ] || continue
  rm -rf "$place/venv"
  "$python" -m venv "$place/venv"
  "$place/venv/bin/pip" install -q --disable-pip-version-check numpy "$wheel$extra"
  cp examples/python/numpy_products.py "$place/"
  inside() { (cd "$place" && PYTHONPATH='' "$@"); }
  for level in $(inside venv/bin/python -c 'from tandem import _isa
print(*(each for each in _isa.runnable() if (_isa.FOLDER / each).is_dir()))'); do
    printf '%s, %s: ' "$(basename "$wheel")" "$level"
    TANDEM_ISA=$level inside venv/bin/python numpy_products.py
    TANDEM_ISA=$level inside venv/bin/python -c "import tandem; assert tandem.__isa__ == '$level'"
    checked=$((checked + 1))
  done
  [ -z "$extra" ] || inside venv/bin/python -c '
import tandem
try:
    print(tandem.run(1, lambda comm: f"a rank on {comm.device}", device="cuda")[0])
except tandem.Unsupported as error:
    assert "no GPU" in str(error), error
    print(error)'
done
[ "$checked" -gt 0 ] || { echo "wheel_check: no wheel in $dist/ for a Python that is here: make wheel" >&2; exit 1; }
