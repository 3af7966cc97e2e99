#include "overlap/ag_gemm/cuda/fused_kernel.cuh"

namespace tandem::gpu {

std::unique_ptr<FusedAgKernel> make_fused_ag_128x256() {
  return std::make_unique<fused::Cooperative<128, 256, 2>>();
}

}  // namespace tandem::gpu
