#include "core/cuda/load_module.cuh"
#include "overlap/ag_gemm/cuda/arriving_kernel.cuh"

namespace tandem::gpu {
namespace {

template <class Element>
using WeightKn = fused::Arriving<Element, Element, fused::AnyRows, fused::ShardCopyWarp, true>;

}  // namespace

std::unique_ptr<FusedAgKernel> make_fused_ag_any_rows_kn(const FusedAgShape& shape) {
  if (shape.dtype == DType::f16) return std::make_unique<WeightKn<__half>>(shape);
  return std::make_unique<WeightKn<__nv_bfloat16>>(shape);
}

}  // namespace tandem::gpu
