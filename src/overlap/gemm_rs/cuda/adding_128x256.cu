#include "overlap/gemm_rs/cuda/adding_kernel.cuh"

namespace tandem::gpu {

std::unique_ptr<AddingKernel> make_adding_128x256() {
  return std::make_unique<fused::Adding>();
}

}  // namespace tandem::gpu
