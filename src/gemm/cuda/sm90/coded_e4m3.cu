#include "core/cuda/load_module.cuh"
#include "gemm/cuda/coded_kernels.h"
#include "gemm/cuda/coded_launch.cuh"

namespace tandem::gpu {

void launch_e4m3_gemm(cudaStream_t stream, const CodedMatrix& weight, const Tensor& x,
                      const Tensor& out, const CodedGemmOptions& options) {
  coded::launch_format<WeightFormat::e4m3>({weight, x, out, options.accumulate}, options.swiglu,
                                           stream);
}

}  // namespace tandem::gpu
