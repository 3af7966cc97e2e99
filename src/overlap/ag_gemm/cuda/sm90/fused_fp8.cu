#include "core/cuda/load_module.cuh"
#include "overlap/ag_gemm/cuda/arriving_kernel.cuh"

namespace tandem::gpu {

std::unique_ptr<FusedAgKernel> make_fused_ag_fp8(const FusedAgShape& shape) {
  if (shape.result == DType::f16) {
    return std::make_unique<fused::Arriving<__nv_fp8_e4m3, __half>>(shape);
  }
  return std::make_unique<fused::Arriving<__nv_fp8_e4m3, __nv_bfloat16>>(shape);
}

}  // namespace tandem::gpu
