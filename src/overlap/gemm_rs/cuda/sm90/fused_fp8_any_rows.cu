#include "core/cuda/load_module.cuh"
#include "overlap/gemm_rs/cuda/fused_kernel.cuh"

namespace tandem::gpu {

std::unique_ptr<FusedRsKernel> make_fused_rs_fp8_any_rows(const FusedRsShape& shape) {
  if (shape.result == DType::f16) {
    return std::make_unique<fused::FusedRs<__nv_fp8_e4m3, __half, fused::AnyRows>>(shape);
  }
  return std::make_unique<fused::FusedRs<__nv_fp8_e4m3, __nv_bfloat16, fused::AnyRows>>(shape);
}

}  // namespace tandem::gpu
