#include "gemm/cuda/scale.h"

#include <algorithm>

#include "core/cuda/check.h"
#include "core/cuda/element.cuh"
#include "core/cuda/load_module.cuh"

namespace tandem::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kColumns = 4;  // scaled at once by a thread
constexpr int kCodes = 16;   // widened at once by a thread

template <typename T>
struct alignas(kColumns * sizeof(T)) Four {
  T at[kColumns];
};

template <typename T>
__global__ void __launch_bounds__(kThreads) scale_kernel(ScaleParams params) {
  const auto* in = reinterpret_cast<const Four<float>*>(params.product);
  auto* out = static_cast<Four<T>*>(params.out);
  const auto* bias = static_cast<const T*>(params.bias);
  const int64_t across = params.columns / kColumns, total = params.rows * across;
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < total; i += step) {
    const int64_t row = i / across, column = i % across * kColumns;
    const float x = params.x_scales[params.by_row ? row : 0];
    const Four<float> product = in[i];
    Four<T> result;
#pragma unroll
    for (int e = 0; e < kColumns; ++e) {
      float value = product.at[e] * x * params.weight_scales[params.by_row ? column + e : 0];
      if (bias) value += to_float(bias[column + e]);
      result.at[e] = from_float<T>(value);
    }
    out[i] = result;
  }
}

struct alignas(16) Codes {
  __nv_fp8_e4m3 at[kCodes];
};
struct alignas(16) Wide {
  __nv_bfloat16 at[kCodes];
};

__global__ void __launch_bounds__(kThreads)
    widen_kernel(const Codes* in, Wide* out, int64_t total) {
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < total; i += step) {
    const Codes codes = in[i];
    Wide wide;
#pragma unroll
    for (int e = 0; e < kCodes; ++e) {
      wide.at[e] = from_float<__nv_bfloat16>(to_float(codes.at[e]));
    }
    out[i] = wide;
  }
}

int blocks_for(int64_t threads) {
  return int(std::min<int64_t>((threads + kThreads - 1) / kThreads, 132 * 8));
}

}  // namespace

void launch_scale(const ScaleParams& params, cudaStream_t stream) {
  const int64_t threads = params.rows * params.columns / kColumns;
  if (threads == 0) return;
  with_float_type(params.dtype, [&]<typename T>(T) {
    scale_kernel<T><<<blocks_for(threads), kThreads, 0, stream>>>(params);
  });
  check_launch("scale_kernel");
}

void launch_widen(const void* codes, void* out, int64_t elements, cudaStream_t stream) {
  if (elements == 0) return;
  widen_kernel<<<blocks_for(elements / kCodes), kThreads, 0, stream>>>(
      static_cast<const Codes*>(codes), static_cast<Wide*>(out), elements / kCodes);
  check_launch("widen_kernel");
}

}  // namespace tandem::gpu
