#include "core/cuda/load_module.cuh"
#include "overlap/ag_gemm/cuda/arriving_kernel.cuh"
#include "overlap/ag_gemm/cuda/encoded_copy_warp.cuh"

namespace tandem::gpu {

std::unique_ptr<FusedAgKernel> make_encoded_ag_int8(const FusedAgShape& shape) {
  using CopyWarp = fused::EncodedCopyWarp<EncodedChunk<codec::Integer<8>, 128, 32>>;
  return std::make_unique<
      fused::Arriving<__nv_bfloat16, __nv_bfloat16, fused::WholeTiles, CopyWarp>>(shape);
}

}  // namespace tandem::gpu
