#include "core/cuda/load_module.cuh"
#include "overlap/gemm_rs/cuda/encoded_kernel.cuh"

namespace tandem::gpu {

std::unique_ptr<EncodedRsKernel> make_encoded_rs_int8(const FusedRsShape& shape) {
  using Codec = fused::TileCodec<codec::Integer<8>, 128>;
  return std::make_unique<fused::EncodedRs<__nv_bfloat16, Codec>>(shape);
}

}  // namespace tandem::gpu
