#!/usr/bin/env bash
# setup_cuda.sh: checks the requirements of the CUDA build. The toolkit must be installed by the
# system.
set -eu
fail() {
  echo "setup: $*" >&2
  exit 1
}
command -v nvcc >/dev/null || fail "nvcc: not found: the CUDA build needs CUDA 13.0 or later, with nvcc on the PATH"
root=$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")
find "$root" /usr/include /usr/local/include -name nccl_device.h 2>/dev/null | grep -q . ||
  fail "nccl_device.h: not found under $root: the nccl transport needs NCCL 2.28 or later"

# CUTLASS is header-only; NVIDIA publishes it as a wheel.
version=4.2.0.0
deps=$(cd "$(dirname "$0")/.." && pwd)/.deps
if [ ! -f "$deps/cutlass/cutlass_library/source/include/cutlass/cutlass.h" ]; then
  echo "setup: will fetch nvidia-cutlass $version (headers of the fused kernels) into .deps/"
  mkdir -p "$deps"
  python3 -m pip download -q --no-deps --no-cache-dir -d "$deps" "nvidia-cutlass==$version" ||
    fail "nvidia-cutlass $version: pip could not fetch it: unpack its headers into .deps/cutlass"
  python3 - "$deps" "$version" <<'PY'
import sys, zipfile
deps, version = sys.argv[1:]
with zipfile.ZipFile(f"{deps}/nvidia_cutlass-{version}-py3-none-any.whl") as wheel:
    parts = ("cutlass_library/source/include/", "cutlass_library/source/tools/util/include/")
    wheel.extractall(f"{deps}/cutlass", [n for n in wheel.namelist() if n.startswith(parts)])
PY
fi

# Headers of cuDNN's attention, header-only, too. Without cuDNN, GPUs run the simple kernels.
version=1.32.0
folders="$root /usr/include /usr/local/include $(python3 -c 'import nvidia; print(*nvidia.__path__)' 2>/dev/null || true)"
# shellcheck disable=SC2086
if ! find $folders -name cudnn_version.h 2>/dev/null | grep -q .; then
  echo "setup: cudnn_version.h: not found: attention on GPUs will run the simple kernels"
elif [ ! -f "$deps/cudnn_frontend/include/cudnn_frontend.h" ]; then
  echo "setup: will fetch nvidia-cudnn-frontend $version (headers of cuDNN's attention) into .deps/"
  mkdir -p "$deps"
  python3 -m pip download -q --no-deps --no-cache-dir -d "$deps" "nvidia-cudnn-frontend==$version" ||
    fail "nvidia-cudnn-frontend $version: pip could not fetch it: unpack its headers into .deps/cudnn_frontend"
  python3 - "$deps" "$version" <<'PY'
import glob, sys, zipfile
deps, version = sys.argv[1:]
with zipfile.ZipFile(glob.glob(f"{deps}/nvidia_cudnn_frontend-{version}-*.whl")[0]) as wheel:
    wheel.extractall(f"{deps}/cudnn_frontend", [n for n in wheel.namelist() if n.startswith("include/")])
PY
fi
