// Stub of the GEMM on GPUs for a build without CUDA: no rank is on a GPU.
#include "gemm/cuda/device_gemm.h"
#include "tandem/error.h"

namespace tandem::gpu {

void gemm(CUstream_st*, const Tensor&, const Tensor&, const Tensor&, const GemmOptions&) {
  throw Unsupported("gemm on GPUs: this build has no CUDA (configure with -DTANDEM_CUDA=ON)");
}

void gemm(CUstream_st*, const QuantizedRows&, const QuantizedRows&, const Tensor&, bool) {
  throw Unsupported("gemm on GPUs: this build has no CUDA (configure with -DTANDEM_CUDA=ON)");
}

bool gemm_swiglu(CUstream_st*, const Tensor&, const Tensor&, const Tensor&, SameBits) {
  return false;
}

}  // namespace tandem::gpu
