#include "kernels/cuda/reduce.h"

#include <algorithm>
#include <string>

#include "core/cuda/check.h"
#include "core/cuda/element.cuh"
#include "core/cuda/load_module.cuh"

namespace tandem::gpu {
namespace {

constexpr int kThreads = 512;

constexpr int kFewParts = 8;
struct FewParts {
  const void* of[kFewParts];
  int count;
};

template <typename T, int kParts>
__global__ void __launch_bounds__(kThreads) sum_kernel(FewParts parts, Vec<T>* out, int64_t packs) {
  using In = Vec<T>;
  constexpr int kElements = In::kElements;
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < packs; i += step) {
    In part[kParts], result;
#pragma unroll
    for (int r = 0; r < kParts; ++r) part[r] = static_cast<const In*>(parts.of[r])[i];
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      float sum = to_float(part[0].at[e]);
#pragma unroll
      for (int r = 1; r < kParts; ++r) sum += to_float(part[r].at[e]);
      result.at[e] = from_float<T>(sum);
    }
    out[i] = result;
  }
}

// Sum of more than kFewParts partial sums.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    sum_many_kernel(Parts parts, Vec<T>* out, int64_t packs) {
  using In = Vec<T>;
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < packs; i += step) {
    float sums[In::kElements] = {};
    for (int r = 0; r < parts.count; ++r) {
      const In part = static_cast<const In*>(parts.of[r])[i];
#pragma unroll
      for (int e = 0; e < In::kElements; ++e) sums[e] += to_float(part.at[e]);
    }
    In result;
#pragma unroll
    for (int e = 0; e < In::kElements; ++e) result.at[e] = from_float<T>(sums[e]);
    out[i] = result;
  }
}

template <typename T>
void launch_typed(const Parts& parts, const Tensor& out, cudaStream_t stream) {
  const int64_t packs = out.elements() / Vec<T>::kElements;
  const int blocks = int(std::min<int64_t>((packs + kThreads - 1) / kThreads, 132 * 4));
  if (parts.count > kFewParts && parts.count <= kMaxParts) {
    sum_many_kernel<T><<<blocks, kThreads, 0, stream>>>(parts, out.as<Vec<T>>(), packs);
    return;
  }
  FewParts few{{}, parts.count};
  std::copy_n(parts.of, kFewParts, few.of);
  const auto run = [&]<int kParts>() {
    sum_kernel<T, kParts><<<blocks, kThreads, 0, stream>>>(few, out.as<Vec<T>>(), packs);
  };
  switch (parts.count) {
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
  throw InvalidArgument("sum: " + std::to_string(parts.count) + " parts: expected 1 to " +
                        std::to_string(kMaxParts));
}

}  // namespace

void launch_sum(const Parts& parts, const Tensor& out, cudaStream_t stream) {
  if (out.elements() == 0) return;
  const bool known =
      with_float_type(out.dtype(), [&]<typename T>(T) { launch_typed<T>(parts, out, stream); });
  if (!known) throw InvalidArgument("sum: " + out.describe() + ": expected a float dtype");
  check_launch("sum_kernel");
}

}  // namespace tandem::gpu
