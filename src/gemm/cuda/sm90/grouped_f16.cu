#include "core/cuda/load_module.cuh"
#include "gemm/cuda/grouped_kernel.cuh"

namespace tandem::gpu {

std::unique_ptr<GroupedGemm> make_grouped_f16(const GroupedShape& shape) {
  return fused::make_grouped<__half, __half, false>(shape);
}

}  // namespace tandem::gpu
