#include "core/cuda/load_module.cuh"
#include "overlap/ag_gemm/cuda/arriving_kernel.cuh"

namespace tandem::gpu {

std::unique_ptr<FusedAgKernel> make_fused_ag_128x256(const FusedAgShape& shape) {
  if (shape.weight_kn) return make_fused_ag_128x256_kn(shape);
  if (shape.dtype == DType::f16) return std::make_unique<fused::Arriving<__half, __half>>(shape);
  return std::make_unique<fused::Arriving<__nv_bfloat16, __nv_bfloat16>>(shape);
}

}  // namespace tandem::gpu
