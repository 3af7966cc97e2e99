#include "overlap/ag_gemm/cuda/arriving_kernel.cuh"

namespace tandem::gpu {

std::unique_ptr<FusedAgKernel> make_fused_ag_128x256(DType dtype, const FusedAgShape& shape,
                                                     std::span<const int> heads) {
  if (dtype == DType::f16) return std::make_unique<fused::Arriving<__half>>(shape, heads);
  return std::make_unique<fused::Arriving<__nv_bfloat16>>(shape, heads);
}

}  // namespace tandem::gpu
