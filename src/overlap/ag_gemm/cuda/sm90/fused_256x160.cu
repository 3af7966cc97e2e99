#include "core/cuda/load_module.cuh"
#include "overlap/ag_gemm/cuda/fused_kernel.cuh"

namespace tandem::gpu {

std::unique_ptr<FusedAgKernel> make_fused_ag_256x160(const FusedAgShape& shape) {
  return std::make_unique<fused::Cooperative<256, 160>>(shape);
}

}  // namespace tandem::gpu
