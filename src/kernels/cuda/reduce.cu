#include "kernels/cuda/reduce.h"

#include <algorithm>
#include <string>

#include "core/cuda/check.h"
#include "core/cuda/element.cuh"
#include "core/cuda/load_module.cuh"

namespace tandem::gpu {
namespace {

constexpr int kThreads = 512;

constexpr int kFewPartials = 8;
struct FewPartials {
  const void* of[kFewPartials];
  int count;
};

template <typename T, int kPartials>
__global__ void __launch_bounds__(kThreads)
    sum_kernel(FewPartials partials, Vec<T>* out, int64_t num_vecs) {
  using In = Vec<T>;
  constexpr int kElements = In::kElements;
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < num_vecs; i += step) {
    In partial[kPartials], result;
#pragma unroll
    for (int r = 0; r < kPartials; ++r) partial[r] = static_cast<const In*>(partials.of[r])[i];
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      float sum = to_float(partial[0].at[e]);
#pragma unroll
      for (int r = 1; r < kPartials; ++r) sum += to_float(partial[r].at[e]);
      result.at[e] = from_float<T>(sum);
    }
    out[i] = result;
  }
}

// Sum of more than kFewPartials partial sums.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    sum_many_kernel(Partials partials, Vec<T>* out, int64_t num_vecs) {
  using In = Vec<T>;
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < num_vecs; i += step) {
    float sums[In::kElements] = {};
    for (int r = 0; r < partials.count; ++r) {
      const In partial = static_cast<const In*>(partials.of[r])[i];
#pragma unroll
      for (int e = 0; e < In::kElements; ++e) sums[e] += to_float(partial.at[e]);
    }
    In result;
#pragma unroll
    for (int e = 0; e < In::kElements; ++e) result.at[e] = from_float<T>(sums[e]);
    out[i] = result;
  }
}

template <typename T>
void launch_typed(const Partials& partials, const Tensor& out, cudaStream_t stream) {
  const int64_t num_vecs = out.elements() / Vec<T>::kElements;
  const int blocks = int(std::min<int64_t>((num_vecs + kThreads - 1) / kThreads, 132 * 4));
  if (partials.count > kFewPartials && partials.count <= kMaxPartials) {
    sum_many_kernel<T><<<blocks, kThreads, 0, stream>>>(partials, out.as<Vec<T>>(), num_vecs);
    return;
  }
  FewPartials few{{}, partials.count};
  std::copy_n(partials.of, kFewPartials, few.of);
  const auto run = [&]<int kPartials>() {
    sum_kernel<T, kPartials><<<blocks, kThreads, 0, stream>>>(few, out.as<Vec<T>>(), num_vecs);
  };
  switch (partials.count) {
    case 1:
      return run.template operator()<1>();
    case 2:
      return run.template operator()<2>();
    case 3:
      return run.template operator()<3>();
    case 4:
      return run.template operator()<4>();
    case 5:
      return run.template operator()<5>();
    case 6:
      return run.template operator()<6>();
    case 7:
      return run.template operator()<7>();
    case 8:
      return run.template operator()<8>();
  }
  throw InvalidArgument("sum: " + std::to_string(partials.count) + " partial sums: expected 1 to " +
                        std::to_string(kMaxPartials));
}

}  // namespace

void launch_sum(const Partials& partials, const Tensor& out, cudaStream_t stream) {
  if (out.elements() == 0) return;
  const bool known =
      with_float_type(out.dtype(), [&]<typename T>(T) { launch_typed<T>(partials, out, stream); });
  if (!known) throw InvalidArgument("sum: " + out.describe() + ": expected a float dtype");
  check_launch("sum_kernel");
}

}  // namespace tandem::gpu
