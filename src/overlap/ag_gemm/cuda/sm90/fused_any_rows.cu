#include "core/cuda/load_module.cuh"
#include "overlap/ag_gemm/cuda/arriving_kernel.cuh"

namespace tandem::gpu {

std::unique_ptr<FusedAgKernel> make_fused_ag_any_rows(const FusedAgShape& shape) {
  if (shape.weight_kn) return make_fused_ag_any_rows_kn(shape);
  if (shape.dtype == DType::f16) {
    return std::make_unique<fused::Arriving<__half, __half, fused::AnyRows>>(shape);
  }
  return std::make_unique<fused::Arriving<__nv_bfloat16, __nv_bfloat16, fused::AnyRows>>(shape);
}

}  // namespace tandem::gpu
