#include "core/cuda/load_module.cuh"
#include "overlap/ag_gemm/cuda/arriving_kernel.cuh"
#include "overlap/ag_gemm/cuda/encoded_courier.cuh"

namespace tandem::gpu {

std::unique_ptr<FusedAgKernel> make_encoded_ag_int4_g32(const FusedAgShape& shape) {
  using Courier = fused::EncodedCourier<EncodedPiece<codec::Integer<4>, 32, 32>>;
  return std::make_unique<
      fused::Arriving<__nv_bfloat16, __nv_bfloat16, fused::WholeTiles, Courier>>(shape);
}

}  // namespace tandem::gpu
