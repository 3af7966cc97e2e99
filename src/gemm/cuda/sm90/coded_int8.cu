#include "core/cuda/load_module.cuh"
#include "gemm/cuda/coded_kernels.h"
#include "gemm/cuda/coded_launch.cuh"

namespace tandem::gpu {

void launch_int8_gemm(cudaStream_t stream, const CodedMatrix& weight, const Tensor& x,
                      const Tensor& out, const CodedGemmOptions& options) {
  coded::launch_format<WeightFormat::int8>({weight, x, out, options.accumulate}, options.swiglu,
                                           stream);
}

}  // namespace tandem::gpu
