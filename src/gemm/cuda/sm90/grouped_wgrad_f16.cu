#include "core/cuda/load_module.cuh"
#include "gemm/cuda/grouped_wgrad_kernel.cuh"

namespace tandem::gpu {

std::unique_ptr<GroupedWgrad> make_grouped_wgrad_f16(const WgradShape& shape) {
  return std::make_unique<fused::Wgrad<__half>>(shape);
}

}  // namespace tandem::gpu
