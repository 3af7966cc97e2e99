#include "core/cuda/load_module.cuh"
#include "gemm/cuda/grouped_kernel.cuh"

namespace tandem::gpu {

std::unique_ptr<GroupedGemm> make_grouped_fp8(const GroupedShape& shape) {
  return fused::make_grouped<__nv_fp8_e4m3, __nv_bfloat16, false>(shape);
}

}  // namespace tandem::gpu
