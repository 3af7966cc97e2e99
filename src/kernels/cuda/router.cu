#include <algorithm>
#include <limits>
#include <string>

#include "core/cuda/check.h"
#include "core/cuda/load_module.cuh"
#include "kernels/cuda/router.h"
#include "kernels/cuda/rows.cuh"

namespace tandem::gpu {
namespace {

constexpr int kRowsOfBlock = 4, kThreads = 32 * kRowsOfBlock;
constexpr float kTiny = 1e-20f;  // added to a sum of scores before dividing by it

template <typename T, typename Combine>
__device__ T over_warp(T value, const Combine& combine) {
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) {
    value = combine(value, __shfl_xor_sync(~0u, value, apart));
  }
  return value;
}

struct Sum {
  __device__ double operator()(double a, double b) const { return a + b; }
};

// One warp per row: lane l has experts l, l + 32, ...
template <int kPerLane>
__global__ void __launch_bounds__(kThreads)
    route_kernel(const float* logits, const float* bias, const int32_t* tokens,
                 RouterOptions options, int64_t rows, int all, float* scores, int32_t* experts,
                 float* weights) {
  constexpr float kNever = -std::numeric_limits<float>::infinity();
  constexpr float kTaken = std::numeric_limits<float>::quiet_NaN();  // never >= a key
  const int64_t row = int64_t(blockIdx.x) * kRowsOfBlock + threadIdx.x / 32;
  const int lane = int(threadIdx.x) % 32;
  if (row >= rows) return;
  if (tokens && __ldg(tokens + row) < 0) {  // padding
    for (int e = lane; e < all; e += 32) scores[row * all + e] = 0;
    for (int k = lane; k < options.top_k; k += 32) {
      experts[row * options.top_k + k] = -1;
      weights[row * options.top_k + k] = 0;
    }
    return;
  }
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
    if (e < all) scores[row * all + e] = score[i];
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

// Gradient of a row's logits from the saved scores: one warp per row, in f64 as on the CPU.
template <int kPerLane>
__global__ void __launch_bounds__(kThreads)
    route_backward_kernel(const float* scores, const int32_t* experts, const float* dweights,
                          const float* balance, RouterOptions options, int64_t rows, int all,
                          float* dlogits) {
  const int64_t row = int64_t(blockIdx.x) * kRowsOfBlock + threadIdx.x / 32;
  const int lane = int(threadIdx.x) % 32;
  if (row >= rows) return;
  scores += row * all;
  experts += row * options.top_k;
  dweights += row * options.top_k;
  double score[kPerLane], d[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int e = lane + 32 * i;
    score[i] = e < all ? double(__ldg(scores + e)) : 0;
    d[i] = 0;
  }
  double sum = 1, along = 0;  // along the chosen scores: scaling them all leaves the weights
  if (options.normalize) {
    double chosen_sum = 0;
    for (int k = lane; k < options.top_k; k += 32) {
      const int e = experts[k];
      const double chosen = unsigned(e) < unsigned(all) ? double(__ldg(scores + e)) : 0;
      chosen_sum += chosen;
      along += double(dweights[k]) * chosen;
    }
    sum = over_warp(chosen_sum, Sum{}) + double(kTiny);
    along = over_warp(along, Sum{}) / sum;
  }
  for (int k = 0; k < options.top_k; ++k) {
    const int e = experts[k];
    const double gradient = (double(dweights[k]) - along) * double(options.scale) / sum;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (e == lane + 32 * i) d[i] = gradient;
    }
  }
  if (balance) {
    double all_scores = 0, mean = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int e = lane + 32 * i;
      all_scores += score[i];
      if (e < all) mean += double(__ldg(balance + e)) * score[i];
    }
    all_scores = over_warp(all_scores, Sum{}) + double(kTiny);
    mean = over_warp(mean, Sum{}) / all_scores;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int e = lane + 32 * i;
      if (e < all) d[i] += (double(__ldg(balance + e)) - mean) / all_scores;
    }
  }
  double dot = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) dot += d[i] * score[i];
  dot = over_warp(dot, Sum{});
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int e = lane + 32 * i;
    if (e >= all) continue;
    const double factor = options.sigmoid ? (1 - score[i]) * d[i] : d[i] - dot;
    dlogits[row * all + e] = float(score[i] * factor);
  }
}

unsigned num_blocks(int64_t rows) {
  return unsigned((rows + kRowsOfBlock - 1) / kRowsOfBlock);
}

// Calls body(std::integral_constant<int, experts per lane>).
template <typename Body>
void with_experts(const char* kernel, int64_t all, int top_k, const Body& body) {
  if (all < 1 || all > kMaxExperts || top_k < 1 || top_k > all) {
    throw InvalidArgument(std::string(kernel) + ": " + std::to_string(top_k) + " of " +
                          std::to_string(all) + " experts: expected 1 to all of at most " +
                          std::to_string(kMaxExperts));
  }
  if (all <= 64) return body(std::integral_constant<int, 2>{});
  if (all <= 256) return body(std::integral_constant<int, 8>{});
  body(std::integral_constant<int, 32>{});
}

}  // namespace

void route_forward(cudaStream_t stream, const Tensor& logits, const Tensor& bias,
                   const RouterOptions& options, const Tensor& scores, const Tensor& experts,
                   const Tensor& weights, const Tensor& tokens) {
  require_dtype("route: logits", logits, DType::f32);
  if (tokens.data()) require_dtype("route: tokens", tokens, DType::i32);
  const int64_t rows = logits.dim(0), all = logits.dim(1);
  with_experts("route", all, options.top_k, [&](auto per_lane) {
    if (rows == 0) return;
    route_kernel<per_lane()><<<num_blocks(rows), kThreads, 0, stream>>>(
        logits.as<float>(), bias.as<float>(), tokens.as<int32_t>(), options, rows, int(all),
        scores.as<float>(), experts.as<int32_t>(), weights.as<float>());
    check_launch("route_kernel");
  });
}

void route_backward(cudaStream_t stream, const Tensor& scores, const Tensor& experts,
                    const Tensor& dweights, const Tensor& balance, const RouterOptions& options,
                    const Tensor& dlogits) {
  require_dtype("route_backward: scores", scores, DType::f32);
  const int64_t rows = scores.dim(0), all = scores.dim(1);
  with_experts("route_backward", all, options.top_k, [&](auto per_lane) {
    if (rows == 0) return;
    route_backward_kernel<per_lane()><<<num_blocks(rows), kThreads, 0, stream>>>(
        scores.as<float>(), experts.as<int32_t>(), dweights.as<float>(), balance.as<float>(),
        options, rows, int(all), dlogits.as<float>());
    check_launch("route_backward_kernel");
  });
}

}  // namespace tandem::gpu
