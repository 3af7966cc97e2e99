#include "core/cuda/load_module.cuh"
#include "overlap/gemm_rs/cuda/fused_kernel.cuh"

namespace tandem::gpu {

std::unique_ptr<FusedRsKernel> make_fused_rs_any_rows(const FusedRsShape& shape) {
  if (shape.weight_kn) return make_fused_rs_any_rows_kn(shape);
  if (shape.dtype == DType::f16) {
    return std::make_unique<fused::FusedRs<__half, __half, fused::AnyRows>>(shape);
  }
  return std::make_unique<fused::FusedRs<__nv_bfloat16, __nv_bfloat16, fused::AnyRows>>(shape);
}

}  // namespace tandem::gpu
