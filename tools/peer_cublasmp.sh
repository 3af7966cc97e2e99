#!/usr/bin/env bash
# peer_cublasmp.sh: fetches NVIDIA's cuBLASMp and the NCCL it needs (PyPI, some 320 MB) into
# .deps/cublasmp and builds build-cuda/bin/peer_cublasmp, which tools/gpu_check.sh runs after ours.
set -eu
cd "$(dirname "$0")/.."
deps=$PWD/.deps/cublasmp
if [ ! -e "$deps/nvidia/cublasmp" ]; then
  echo "fetching cuBLASMp 0.10 and its NCCL into .deps/cublasmp"
  python3 -m pip install --quiet --no-deps --target "$deps" 'nvidia-cublasmp-cu13==0.10.*' \
    'nvidia-nccl-cu13>=2.29.2'
fi
make --no-print-directory build-only CUDA=1 CMAKE_FLAGS="-DTANDEM_CUBLASMP=$deps" TARGETS=peer_cublasmp
echo "run it with LD_LIBRARY_PATH=$deps/nvidia/cublasmp/cu13/lib:$deps/nvidia/nccl/lib"
