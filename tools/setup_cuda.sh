#!/usr/bin/env bash
# setup_cuda.sh: checks what the CUDA build needs. The toolkit itself is the system's to install.
set -eu
fail() {
  echo "setup: $*" >&2
  exit 1
}
command -v nvcc >/dev/null || fail "nvcc: not found: the CUDA build needs CUDA 13.0 or later, with nvcc on the PATH"
root=$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")
find "$root" /usr/include /usr/local/include -name nccl_device.h 2>/dev/null | grep -q . ||
  fail "nccl_device.h: not found under $root: the nccl transport needs NCCL 2.28 or later"
