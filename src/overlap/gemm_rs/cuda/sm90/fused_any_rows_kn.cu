#include "core/cuda/load_module.cuh"
#include "overlap/gemm_rs/cuda/fused_kernel.cuh"

namespace tandem::gpu {
namespace {

template <class Element>
using WeightKn = fused::FusedRs<Element, Element, fused::AnyRows, true>;

}  // namespace

std::unique_ptr<FusedRsKernel> make_fused_rs_any_rows_kn(const FusedRsShape& shape) {
  if (shape.dtype == DType::f16) return std::make_unique<WeightKn<__half>>(shape);
  return std::make_unique<WeightKn<__nv_bfloat16>>(shape);
}

}  // namespace tandem::gpu
