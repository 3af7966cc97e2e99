#include "core/cuda/load_module.cuh"
#include "overlap/gemm_rs/cuda/cutlass_kernel.cuh"

namespace tandem::gpu {

std::unique_ptr<CutlassRsKernel> make_cutlass_rs_128x256() {
  return std::make_unique<fused::RsKernel<cutlass::bfloat16_t, 256, 2>>();
}

}  // namespace tandem::gpu
