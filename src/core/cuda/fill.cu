#include "core/cuda/fill.h"

#include <cmath>

#include "core/cuda/check.h"
#include "core/cuda/element.cuh"
#include "core/cuda/fill.cuh"
#include "core/cuda/load_module.cuh"

namespace tandem::gpu {
namespace {

constexpr int kThreads = 256;

__global__ void fill_scales_kernel(float* out, int64_t count, uint64_t seed, uint64_t stream,
                                   int64_t first) {
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step) {
    out[i] = scale_value(seed, stream, first + i);
  }
}

template <typename T>
__global__ void fill_kernel(T* out, int64_t count, uint64_t seed, uint64_t stream, int64_t first,
                            Values values) {
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step) {
    const float value = uniform_value(seed, stream, first + i);
    out[i] = from_float<T>(values == Values::positive ? fabsf(value) : value);
  }
}

template <typename T>
__global__ void fill_normal_kernel(T* out, int64_t count, uint64_t seed, uint64_t stream,
                                   int64_t first) {
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step) {
    const auto words = philox(seed, stream, uint64_t(first + i));
    const float u = (float(words[0] >> 8) + 1) * 0x1p-24f, v = float(words[1]) * 0x1p-32f;
    out[i] = from_float<T>(sqrtf(-2 * logf(u)) * cospif(2 * v));
  }
}

void require_float(bool known, const Tensor& tensor) {
  if (!known) throw InvalidArgument("dtype of " + tensor.describe() + ": expected a float type");
}

}  // namespace

void fill_scales(const Tensor& tensor, uint64_t seed, uint64_t stream, int64_t first,
                 cudaStream_t on) {
  if (tensor.elements() == 0) return;
  fill_scales_kernel<<<264, kThreads, 0, on>>>(tensor.as<float>(), tensor.elements(), seed, stream,
                                               first);
  check_launch("fill_scales_kernel");
}

void fill_uniform(const Tensor& tensor, uint64_t seed, uint64_t stream, int64_t first,
                  cudaStream_t on, Values values) {
  if (tensor.elements() == 0) return;
  require_float(with_storage_type(tensor.dtype(),
                                  [&]<typename T>(T) {
                                    fill_kernel<<<1056, kThreads, 0, on>>>(tensor.as<T>(),
                                                                           tensor.elements(), seed,
                                                                           stream, first, values);
                                  }),
                tensor);
  check_launch("fill_kernel");
}

void fill_normal(const Tensor& tensor, uint64_t seed, uint64_t stream, int64_t first,
                 cudaStream_t on) {
  if (tensor.elements() == 0) return;
  require_float(with_float_type(tensor.dtype(),
                                [&]<typename T>(T) {
                                  fill_normal_kernel<<<1056, kThreads, 0, on>>>(
                                      tensor.as<T>(), tensor.elements(), seed, stream, first);
                                }),
                tensor);
  check_launch("fill_normal_kernel");
}

void poison(const Tensor& tensor, cudaStream_t on) {
  check(cudaMemsetAsync(tensor.data(), 0xff, tensor.bytes(), on), "poison");
}

}  // namespace tandem::gpu
