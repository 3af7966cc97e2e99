#include "core/cuda/load_module.cuh"
#include "overlap/gemm_ar/cuda/fused_kernel.cuh"

namespace tandem::gpu {

std::unique_ptr<FusedArKernel> make_fused_ar_fp8_bf16(FusedArTile tile) {
  return fused::make_ar_kernel<cutlass::float_e4m3_t, cutlass::bfloat16_t>(tile);
}

}  // namespace tandem::gpu
