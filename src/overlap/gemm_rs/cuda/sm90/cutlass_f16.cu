#include "core/cuda/load_module.cuh"
#include "overlap/gemm_rs/cuda/cutlass_kernel.cuh"

namespace tandem::gpu {

std::unique_ptr<CutlassRsKernel> make_cutlass_rs_f16() {
  return std::make_unique<fused::RsKernel<cutlass::half_t, 256, 1>>();
}

}  // namespace tandem::gpu
