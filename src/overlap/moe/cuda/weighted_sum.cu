#include <type_traits>

#include "core/cuda/check.h"
#include "core/cuda/load_module.cuh"
#include "overlap/moe/cuda/permute.h"
#include "overlap/moe/cuda/weighted_sum.cuh"
#include "tandem/error.h"

namespace tandem::gpu {
namespace {

constexpr int kThreads = 256;

/// kElements of T, with the alignment of a vector access.
template <typename T, int kElements>
struct alignas(sizeof(T) * kElements < 16 ? sizeof(T) * kElements : 16) Few {
  T at[kElements];
};

// One block per row.
template <typename T, typename Out>
__global__ void __launch_bounds__(kThreads)
    weighted_sum_kernel(const Vec<T>* y, const int32_t* position, const float* weights, int top_k,
                        Few<Out, Vec<T>::kElements>* out, int64_t vecs) {
  constexpr int kElements = Vec<T>::kElements;
  const int64_t row = blockIdx.x;
  position += row * top_k;
  if (weights) weights += row * top_k;
  for (int64_t i = threadIdx.x; i < vecs; i += kThreads) {
    float sum[kElements] = {};
    add_weighted<T>(sum, y, vecs, i, position, weights, top_k);
    Few<Out, kElements> result;
#pragma unroll
    for (int e = 0; e < kElements; ++e) result.at[e] = from_float<Out>(sum[e]);
    out[row * vecs + i] = result;
  }
}

template <typename T, typename Out>
void launch_typed(const Tensor& y, const int32_t* position, const float* weights, int top_k,
                  const Tensor& out, cudaStream_t stream) {
  constexpr int kElements = Vec<T>::kElements;
  weighted_sum_kernel<T, Out><<<unsigned(out.dim(0)), kThreads, 0, stream>>>(
      y.as<Vec<T>>(), position, weights, top_k, out.as<Few<Out, kElements>>(),
      out.dim(1) / kElements);
}

}  // namespace

void launch_weighted_sum(const Tensor& y, const int32_t* position, const float* weights, int top_k,
                         const Tensor& out, cudaStream_t stream) {
  if (out.elements() == 0) return;
  const bool fits = y.dim(1) == out.dim(1) && out.dim(1) * int64_t(size_of(y.dtype())) % 16 == 0 &&
                    (out.dtype() == y.dtype() || out.dtype() == DType::f32);
  const bool known = with_float_type(y.dtype(), [&]<typename T>(T) {
    if (!fits) return;
    if (out.dtype() == DType::f32) {
      launch_typed<T, float>(y, position, weights, top_k, out, stream);
    } else {
      launch_typed<T, T>(y, position, weights, top_k, out, stream);
    }
  });
  if (!known || !fits) {
    throw InvalidArgument("weighted sum of " + y.describe() + " to " + out.describe() +
                          ": expected rows of whole 16 bytes, and the same dtype or f32");
  }
  check_launch("weighted_sum_kernel");
}

}  // namespace tandem::gpu
