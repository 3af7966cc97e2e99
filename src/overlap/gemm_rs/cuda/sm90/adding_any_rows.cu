#include "core/cuda/load_module.cuh"
#include "overlap/gemm_rs/cuda/adding_kernel.cuh"

namespace tandem::gpu {

std::unique_ptr<AddingKernel> make_adding_kernel_any_rows(const AddingShape& shape) {
  if (shape.dtype == DType::f16) {
    return std::make_unique<fused::Adding<__half, __half, fused::AnyRows>>(shape);
  }
  return std::make_unique<fused::Adding<__nv_bfloat16, __nv_bfloat16, fused::AnyRows>>(shape);
}

}  // namespace tandem::gpu
