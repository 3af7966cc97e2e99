#include "kernels/cuda/add_norm.h"

#include "core/cuda/check.h"
#include "kernels/cuda/add_norm.cuh"

namespace tandem::gpu {
namespace {

// A block takes a row.
template <typename T>
__global__ void __launch_bounds__(kNormThreads)
    add_norm_kernel(const Pack<T>* sums, NormRows rows) {
  const int64_t first = int64_t(blockIdx.x) * rows.packs;
  const auto* residual = static_cast<const Pack<T>*>(rows.residual);
  auto* hidden = static_cast<Pack<T>*>(rows.hidden);
  norm_row<T>(rows, blockIdx.x, [&](int64_t i) {
    const Pack<T> sum = sums[first + i], before = residual[first + i];
    Pack<T> after;
#pragma unroll
    for (int e = 0; e < Pack<T>::kElements; ++e) {
      after.at[e] = from_float<T>(to_float(sum.at[e]) + to_float(before.at[e]));
    }
    hidden[first + i] = after;
    return after;
  });
}

}  // namespace

void launch_add_norm(const Tensor& sum, const AddNorm& add_norm, const Tensor& out,
                     cudaStream_t stream) {
  if (out.elements() == 0) return;
  const bool known = with_float_type(out.dtype(), [&]<typename T>(T) {
    add_norm_kernel<T><<<unsigned(out.dim(0)), kNormThreads, 0, stream>>>(
        sum.as<const Pack<T>>(), norm_rows_of(add_norm, out));
  });
  if (!known) throw InvalidArgument("add_norm: " + out.describe() + ": expected a float dtype");
  check_launch("add_norm_kernel");
}

}  // namespace tandem::gpu
