#include <limits>
#include <string>

#include "core/cuda/check.h"
#include "core/cuda/load_module.cuh"
#include "overlap/moe/cuda/permute.h"
#include "tandem/error.h"

namespace tandem::gpu {
namespace {

constexpr int kRowsOfBlock = 4, kThreads = 32 * kRowsOfBlock;
constexpr float kTiny = 1e-20f;  // added to a sum of scores before dividing by it

template <typename Combine>
__device__ float over_warp(float value, const Combine& combine) {
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) {
    value = combine(value, __shfl_xor_sync(~0u, value, apart));
  }
  return value;
}

// One warp per row: lane l has experts l, l + 32, ...
template <int kPerLane>
__global__ void __launch_bounds__(kThreads)
    route_kernel(const float* logits, const float* bias, RouterOptions options, int64_t rows,
                 int all, int32_t* experts, float* weights) {
  constexpr float kNever = -std::numeric_limits<float>::infinity();
  constexpr float kTaken = std::numeric_limits<float>::quiet_NaN();  // never >= a key
  const int64_t row = int64_t(blockIdx.x) * kRowsOfBlock + threadIdx.x / 32;
  const int lane = int(threadIdx.x) % 32;
  if (row >= rows) return;
  const auto more = [](float a, float b) { return fmaxf(a, b); };
  const auto plus = [](float a, float b) { return a + b; };
  float score[kPerLane], key[kPerLane];
  float maximum = kNever;
  bool finite = true;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int e = lane + 32 * i;
    score[i] = e < all ? __ldg(logits + row * all + e) : kNever;
    finite = finite && (e >= all || isfinite(score[i]));
    maximum = fmaxf(maximum, score[i]);
  }
  finite = __all_sync(~0u, finite);
  maximum = over_warp(maximum, more);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    score[i] = options.sigmoid ? 1 / (1 + expf(-score[i])) : expf(score[i] - maximum);
    if (!finite || lane + 32 * i >= all) score[i] = 0;
    sum += score[i];
  }
  if (!options.sigmoid) {
    sum = over_warp(sum, plus);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) score[i] = finite ? score[i] / sum : 0;
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int e = lane + 32 * i;
    key[i] = e < all ? score[i] + (bias ? __ldg(bias + e) : 0) : kTaken;
  }
  float chosen_sum = kTiny, local = 0;  // lane k holds choice k, 32 at a time
  int32_t expert = 0;
  const auto write = [&](int from, int count) {
    if (lane >= count) return;
    experts[row * options.top_k + from + lane] = expert;
    weights[row * options.top_k + from + lane] = local;
  };
  for (int k = 0; k < options.top_k; ++k) {
    float best = kNever;
    int at = all;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (key[i] > best || (key[i] == best && at == all)) best = key[i], at = lane + 32 * i;
    }
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) {
      const float other = __shfl_xor_sync(~0u, best, apart);
      const int other_at = __shfl_xor_sync(~0u, at, apart);
      if (other > best || (other == best && other_at < at)) best = other, at = other_at;
    }
    float value = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (at == lane + 32 * i) value = score[i], key[i] = kTaken;
    }
    value = __shfl_sync(~0u, value, at % 32);
    chosen_sum += value;
    if (lane == k % 32) expert = at, local = value;
    if (k % 32 == 31 || k + 1 == options.top_k) write(k / 32 * 32, k % 32 + 1);
  }
  const float factor = options.scale / (options.normalize ? chosen_sum : 1);
  __syncwarp();
  for (int k = lane; k < options.top_k; k += 32) {
    float& weight = weights[row * options.top_k + k];
    weight = finite ? weight * factor : std::numeric_limits<float>::quiet_NaN();
  }
}

}  // namespace

void launch_route(const Tensor& logits, const float* bias, const RouterOptions& options,
                  const Tensor& experts, const Tensor& weights, cudaStream_t stream) {
  const int64_t rows = logits.dim(0), all = logits.dim(1);
  if (all < 1 || all > kMaxExperts || options.top_k < 1 || options.top_k > all) {
    throw InvalidArgument("route: " + std::to_string(options.top_k) + " of " + std::to_string(all) +
                          " experts: expected 1 to all of at most " + std::to_string(kMaxExperts));
  }
  if (rows == 0) return;
  const auto launch = [&](auto kernel) {
    kernel<<<unsigned((rows + kRowsOfBlock - 1) / kRowsOfBlock), kThreads, 0, stream>>>(
        logits.as<float>(), bias, options, rows, int(all), experts.as<int32_t>(),
        weights.as<float>());
    check_launch("route_kernel");
  };
  if (all <= 64) return launch(route_kernel<2>);
  if (all <= 256) return launch(route_kernel<8>);
  launch(route_kernel<32>);
}

}  // namespace tandem::gpu
