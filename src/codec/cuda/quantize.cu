#include "codec/cuda/quantize.h"

#include "core/cuda/check.h"
#include "core/cuda/load_module.cuh"
#include "core/cuda/quantize_row.cuh"

namespace tandem::gpu {
namespace {

constexpr int kThreads = 256;

// Max over the thread block, in every thread. Ignores NaN, as fmaxf does.
__device__ float block_max(float value) {
  __shared__ float of_warp[kThreads / 32];
  for (int offset = 16; offset; offset /= 2) {
    value = fmaxf(value, __shfl_xor_sync(~0u, value, offset));
  }
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  for (int w = 0; w < kThreads / 32; ++w) value = fmaxf(value, of_warp[w]);
  return value;
}

// One thread block per row; the second read of the row is from the cache.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    quantize_rows_kernel(const T* x, __nv_fp8_e4m3* codes, float* scales, int64_t columns) {
  const int64_t row = blockIdx.x;
  const auto* in = reinterpret_cast<const Sixteen<T>*>(x + row * columns);
  auto* out = reinterpret_cast<Sixteen<__nv_fp8_e4m3>*>(codes + row * columns);
  const int64_t groups = columns / kCodesAtOnce;
  float maximum = 0;
  for (int64_t i = threadIdx.x; i < groups; i += kThreads) {
    const Sixteen<T> group = in[i];
    maximum = largest(maximum, group);
  }
  const float scale = row_scale(block_max(maximum));
  if (threadIdx.x == 0) scales[row] = scale;
  for (int64_t i = threadIdx.x; i < groups; i += kThreads) {
    const Sixteen<T> group = in[i];
    out[i] = quantized(group, scale);
  }
}

}  // namespace

void launch_quantize_rows(const Tensor& x, const Tensor& codes, const Tensor& scales,
                          cudaStream_t stream) {
  if (x.dim(0) == 0) return;
  with_float_type(x.dtype(), [&]<typename T>(T) {
    quantize_rows_kernel<T><<<unsigned(x.dim(0)), kThreads, 0, stream>>>(
        x.as<const T>(), codes.as<__nv_fp8_e4m3>(), scales.as<float>(), x.dim(1));
  });
  check_launch("quantize_rows_kernel");
}

}  // namespace tandem::gpu
