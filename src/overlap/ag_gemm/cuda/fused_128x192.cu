#include "overlap/ag_gemm/cuda/fused_kernel.cuh"

namespace tandem::gpu {

std::unique_ptr<FusedAgKernel> make_fused_ag_128x192() {
  return std::make_unique<fused::Pingpong<128, 192, 2>>();
}

}  // namespace tandem::gpu
