#include "core/cuda/load_module.cuh"
#include "gemm/cuda/grouped_kernel.cuh"

namespace tandem::gpu {

std::unique_ptr<GroupedGemm> make_grouped_bf16(const GroupedShape& shape) {
  return fused::make_grouped<__nv_bfloat16, __nv_bfloat16, false>(shape);
}

}  // namespace tandem::gpu
