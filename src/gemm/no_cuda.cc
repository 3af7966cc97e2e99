// Stub of the GEMM on GPUs for a build without CUDA: no rank is on a GPU.
#include "gemm/cuda/coded_gemm.h"
#include "gemm/cuda/device_gemm.h"
#include "tandem/error.h"

namespace tandem::gpu {
namespace {

constexpr const char* kNoCodedWeights =
    "coded weights on GPUs: this build has no CUDA (configure with -DTANDEM_CUDA=ON)";

}  // namespace

void gemm(CUstream_st*, const Tensor&, const Tensor&, const Tensor&, const GemmOptions&) {
  throw Unsupported("gemm on GPUs: this build has no CUDA (configure with -DTANDEM_CUDA=ON)");
}

void gemm(CUstream_st*, const QuantizedRows&, const QuantizedRows&, const Tensor&, bool) {
  throw Unsupported("gemm on GPUs: this build has no CUDA (configure with -DTANDEM_CUDA=ON)");
}

bool gemm_swiglu(CUstream_st*, const Tensor&, const Tensor&, const Tensor&, SameBits) {
  return false;
}

CodedShape coded_shape(int64_t, int64_t) {
  throw Unsupported(kNoCodedWeights);
}

bool has_coded_gemm() {
  return false;
}

void quantize(CUstream_st*, const Tensor&, const CodedMatrix&) {
  throw Unsupported(kNoCodedWeights);
}

void read(CUstream_st*, const CodedMatrix&, const Tensor&) {
  throw Unsupported(kNoCodedWeights);
}

bool is_coded_gemm(const CodedMatrix&, const Tensor&, const Tensor&) {
  return false;
}

void coded_gemm(CUstream_st*, const CodedMatrix&, const Tensor&, const Tensor&,
                const CodedGemmOptions&) {
  throw Unsupported(kNoCodedWeights);
}

}  // namespace tandem::gpu
