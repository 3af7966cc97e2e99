#include <algorithm>
#include <string>

#include "core/cuda/check.h"
#include "core/cuda/load_module.cuh"
#include "kernels/cuda/router.h"
#include "kernels/cuda/rows.cuh"

namespace tandem::gpu {
namespace {

constexpr int kWarps = 8, kLoadThreads = 32 * kWarps;
constexpr int kMaxBlocks = 264;
constexpr float kTinySum = 1e-20f;
// Sums of multiples of its inverse are exact in f64 up to 2^25, so atomics may add in any order.
constexpr double kProbabilityUnits = double(1 << 28);

__device__ inline void add_unless_zero(double* to, double value) {
  if (value != 0) atomicAdd(to, value);
}

// One warp per row: lane l has experts l, l + 32, ...
template <int kPerLane>
__global__ void __launch_bounds__(kLoadThreads)
    router_load_kernel(const float* scores, const int32_t* chosen, int64_t rows, int experts,
                       int top_k, double* load) {
  __shared__ double sums[2][32 * kPerLane];  // of the block: counts, probabilities
  const int lane = int(threadIdx.x) % 32;
  for (int i = int(threadIdx.x); i < 2 * 32 * kPerLane; i += kLoadThreads) (&sums[0][0])[i] = 0;
  __syncthreads();
  double probabilities[kPerLane] = {};
  for (int64_t row = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32; row < rows;
       row += int64_t(gridDim.x) * kWarps) {
    float score[kPerLane], sum = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int e = lane + 32 * i;
      score[i] = e < experts ? __ldg(scores + row * experts + e) : 0;
      sum += score[i];
    }
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
    sum += kTinySum;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      probabilities[i] += rint(double(score[i] / sum) * kProbabilityUnits) / kProbabilityUnits;
    }
    for (int k = lane; k < top_k; k += 32) {
      const int e = chosen[row * top_k + k];
      if (unsigned(e) < unsigned(experts)) atomicAdd(&sums[0][e], 1.0);
    }
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) add_unless_zero(&sums[1][lane + 32 * i], probabilities[i]);
  __syncthreads();
  for (int e = int(threadIdx.x); e < experts; e += kLoadThreads) {
    add_unless_zero(load + e, sums[0][e]);
    add_unless_zero(load + experts + e, sums[1][e]);
  }
}

__global__ void __launch_bounds__(kLoadThreads)
    add_loads_kernel(const double* from, double* to, int64_t count) {
  const int64_t i = int64_t(blockIdx.x) * kLoadThreads + threadIdx.x;
  if (i < count) to[i] += from[i];
}

// A thread per expert.
constexpr int kExpertThreads = kMaxExperts;

/// Sum over the block, in a fixed order. All threads must call it.
__device__ double block_sum(double value, double* of_thread) {
  __syncthreads();
  of_thread[threadIdx.x] = value;
  for (unsigned half = kExpertThreads / 2; half; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) of_thread[threadIdx.x] += of_thread[threadIdx.x + half];
  }
  __syncthreads();
  return of_thread[0];
}

__device__ inline float expert_balance(const AuxLoss& loss, double count, double all) {
  return float(loss.coefficient * double(loss.experts) * count / all * double(loss.top_k) / all);
}

__global__ void __launch_bounds__(kExpertThreads)
    balance_kernel(AuxLoss loss, const double* load, float* balance) {
  __shared__ double of_thread[kExpertThreads];
  const int e = int(threadIdx.x);
  const double count = e < loss.experts ? load[e] : 0;
  const double all = fmax(1.0, block_sum(count, of_thread));
  if (e < loss.experts) balance[e] = expert_balance(loss, count, all);
}

__global__ void __launch_bounds__(kExpertThreads)
    aux_loss_kernel(AuxLoss loss, const double* loads, int64_t layers, double* total) {
  __shared__ double of_thread[kExpertThreads];
  const int e = int(threadIdx.x);
  double of_layers = 0;
  for (int64_t layer = 0; layer < layers; ++layer) {
    const double* const load = loads + layer * 2 * loss.experts;
    const double count = e < loss.experts ? load[e] : 0;
    const double all = fmax(1.0, block_sum(count, of_thread));
    const double product =
        e < loss.experts ? double(expert_balance(loss, count, all)) * load[loss.experts + e] : 0;
    of_layers += block_sum(product, of_thread);
  }
  if (e == 0) *total += of_layers;
}

__global__ void __launch_bounds__(kExpertThreads)
    router_bias_kernel(const double* load, int experts, float rate, float* bias) {
  __shared__ double of_thread[kExpertThreads];
  const int e = int(threadIdx.x);
  const double count = e < experts ? load[e] : 0;
  const double mean = block_sum(count, of_thread) / double(experts);
  if (e < experts) bias[e] += count < mean ? rate : count > mean ? -rate : 0.0f;
}

void require_experts(const char* kernel, int64_t experts) {
  if (experts >= 1 && experts <= kMaxExperts) return;
  throw InvalidArgument(std::string(kernel) + ": " + std::to_string(experts) +
                        " experts: expected 1 to " + std::to_string(kMaxExperts));
}

}  // namespace

void add_router_load(cudaStream_t stream, const Tensor& scores, const Tensor& chosen,
                     const Tensor& load) {
  require_dtype("router load: scores", scores, DType::f32);
  require_dtype("router load: chosen", chosen, DType::i32);
  const int64_t rows = scores.dim(0), experts = scores.dim(1);
  require_experts("router load", experts);
  if (rows == 0) return;
  const auto blocks = unsigned(std::min<int64_t>((rows + kWarps - 1) / kWarps, kMaxBlocks));
  const auto launch = [&](auto kernel) {
    kernel<<<blocks, kLoadThreads, 0, stream>>>(scores.as<float>(), chosen.as<int32_t>(), rows,
                                                int(experts), int(chosen.dim(1)),
                                                load.as<double>());
    check_launch("router_load_kernel");
  };
  if (experts <= 64) return launch(router_load_kernel<2>);
  if (experts <= 256) return launch(router_load_kernel<8>);
  launch(router_load_kernel<32>);
}

void add_loads(cudaStream_t stream, const Tensor& from, const Tensor& to) {
  const auto count = int64_t(to.bytes() / sizeof(double));
  if (count == 0) return;
  add_loads_kernel<<<unsigned((count + kLoadThreads - 1) / kLoadThreads), kLoadThreads, 0,
                     stream>>>(from.as<double>(), to.as<double>(), count);
  check_launch("add_loads_kernel");
}

void balance_gradient(cudaStream_t stream, const AuxLoss& loss, const Tensor& load,
                      const Tensor& balance) {
  require_experts("balance gradient", loss.experts);
  balance_kernel<<<1, kExpertThreads, 0, stream>>>(loss, load.as<double>(), balance.as<float>());
  check_launch("balance_kernel");
}

void add_aux_losses(cudaStream_t stream, const AuxLoss& loss, const Tensor& loads,
                    const Tensor& total) {
  require_experts("auxiliary loss", loss.experts);
  aux_loss_kernel<<<1, kExpertThreads, 0, stream>>>(loss, loads.as<double>(), loads.dim(0),
                                                    total.as<double>());
  check_launch("aux_loss_kernel");
}

void adjust_router_bias(cudaStream_t stream, const Tensor& load, float rate, const Tensor& bias) {
  require_experts("router bias", bias.elements());
  router_bias_kernel<<<1, kExpertThreads, 0, stream>>>(load.as<double>(), int(bias.elements()),
                                                       rate, bias.as<float>());
  check_launch("router_bias_kernel");
}

}  // namespace tandem::gpu
