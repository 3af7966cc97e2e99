#include <algorithm>
#include <cstdint>
#include <string>

#include "core/cuda/check.h"
#include "core/cuda/element.cuh"
#include "core/cuda/load_module.cuh"
#include "kernels/cuda/optimizer/optimizer.h"
#include "kernels/cuda/optimizer/optimizer_vectors.cuh"
#include "tandem/error.h"

namespace tandem::gpu {
namespace {

constexpr int kMaxBlocks = 1024;

__device__ void update(const AdamConstants& s, float shrink, float& w, float gradient, float& m,
                       float& v) {
  update_moments(s, gradient, m, v);
  w = shrink * w - s.lr * (m * s.correction1) / (sqrtf(v * s.correction2) + s.eps);
}

template <bool kWorking, typename G>
__global__ void __launch_bounds__(kThreads)
    adamw_kernel(AdamConstants step, float shrink, float4* w, const Four<G>* gradient, float4* m,
                 float4* v, FourBf16* working, int64_t vectors) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= vectors) return;
  float4 wi = w[i], mi = m[i], vi = v[i];
  const float4 g = to_floats(gradient[i]);
  update(step, shrink, wi.x, g.x, mi.x, vi.x);
  update(step, shrink, wi.y, g.y, mi.y, vi.y);
  update(step, shrink, wi.z, g.z, mi.z, vi.z);
  update(step, shrink, wi.w, g.w, mi.w, vi.w);
  w[i] = wi, m[i] = mi, v[i] = vi;
  if constexpr (kWorking) working[i] = to_bf16(wi);
}

template <typename G>
__global__ void __launch_bounds__(kThreads)
    adamw_elements_kernel(AdamConstants step, float shrink, float* w, const G* gradient, float* m,
                          float* v, __nv_bfloat16* working, int64_t count) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  update(step, shrink, w[i], to_float(gradient[i]), m[i], v[i]);
  if (working) working[i] = __float2bfloat16_rn(w[i]);
}

__device__ double combine(double value) {
  __shared__ double of_thread[kThreads];
  of_thread[threadIdx.x] = value;
  for (unsigned half = kThreads / 2; half; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) of_thread[threadIdx.x] += of_thread[threadIdx.x + half];
  }
  __syncthreads();
  return of_thread[0];
}

// Elements before the first vector, the vectors, and the elements after the last.
template <typename T>
struct Split {
  const T* head;
  const Four<T>* vectors;
  const T* tail;
  int64_t num_vectors;
  int num_head, num_tail;

  Split(const T* values, int64_t count) {
    const auto misaligned = int(reinterpret_cast<uintptr_t>(values) / sizeof(T) % kWidth);
    head = values;
    num_head = int(std::min<int64_t>((kWidth - misaligned) % kWidth, count));
    vectors = reinterpret_cast<const Four<T>*>(values + num_head);
    num_vectors = (count - num_head) / kWidth;
    tail = values + num_head + num_vectors * kWidth;
    num_tail = int(count - num_head - num_vectors * kWidth);
  }
};

__device__ double square(float x) {
  return double(x) * double(x);
}

// Squares are summed in f64, as on the CPU.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    squares_kernel(const Split<T> split, double* block_sums) {
  double sum = 0;
  const int64_t step = int64_t(gridDim.x) * kThreads;
#pragma unroll 4
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < split.num_vectors; i += step) {
    const float4 x = to_floats(split.vectors[i]);
    sum += square(x.x) + square(x.y) + square(x.z) + square(x.w);
  }
  const auto thread = int(threadIdx.x);
  if (blockIdx.x == 0 && thread < split.num_head) sum += square(to_float(split.head[thread]));
  if (blockIdx.x == 0 && thread < split.num_tail) sum += square(to_float(split.tail[thread]));
  sum = combine(sum);
  if (threadIdx.x == 0) block_sums[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads)
    add_sums_kernel(const double* block_sums, int blocks, double* total) {
  double sum = 0;
  for (int i = threadIdx.x; i < blocks; i += kThreads) sum += block_sums[i];
  sum = combine(sum);
  if (threadIdx.x == 0) *total += sum;
}

/// Calls body(T{}) with the element type. Throws InvalidArgument unless it is f32 or bf16.
template <typename Body>
void with_gradient(const char* name, const Tensor& values, const Body& body) {
  if (values.dtype() == DType::f32) return body(float{});
  if (values.dtype() == DType::bf16) return body(__nv_bfloat16{});
  throw InvalidArgument(std::string(name) + ": gradient " + values.describe() +
                        ": expected f32 or bf16");
}

}  // namespace

void adamw(cudaStream_t stream, const AdamConstants& step, float shrink, const AdamState& state,
           const Tensor& gradient, const Tensor& working) {
  const auto& [w, m, v] = state;
  const int64_t count = w.elements();
  const bool has_copy = working.data() != nullptr;
  const bool vectors = has_vectors(w) && has_vectors(gradient) && has_vectors(m) &&
                       has_vectors(v) && (!has_copy || has_vectors(working));
  const int64_t whole = vectors ? count / kWidth : 0, rest = count - whole * kWidth;
  with_gradient("adamw", gradient, [&]<typename G>(G) {
    if (whole > 0) {
      const auto kernel = has_copy ? adamw_kernel<true, G> : adamw_kernel<false, G>;
      kernel<<<blocks_for(whole), kThreads, 0, stream>>>(
          step, shrink, w.as<float4>(), gradient.as<const Four<G>>(), m.as<float4>(),
          v.as<float4>(), working.as<FourBf16>(), whole);
      check_launch("adamw_kernel");
    }
    if (rest == 0) return;
    const int64_t at = whole * kWidth;
    adamw_elements_kernel<<<blocks_for(rest), kThreads, 0, stream>>>(
        step, shrink, w.as<float>() + at, gradient.as<const G>() + at, m.as<float>() + at,
        v.as<float>() + at, has_copy ? working.as<__nv_bfloat16>() + at : nullptr, rest);
    check_launch("adamw_elements_kernel");
  });
}

size_t square_sum_bytes(int sums) {
  return (size_t(sums) + kMaxBlocks) * sizeof(double);
}

void add_squares(cudaStream_t stream, const Tensor& values, const Memory& sums, int index) {
  const int64_t count = values.elements();
  if (count == 0) return;
  auto* const totals = reinterpret_cast<double*>(sums.data());
  double* const block_sums = totals + sums.bytes() / sizeof(double) - kMaxBlocks;
  int blocks = 0;
  with_gradient("add_squares", values, [&]<typename T>(T) {
    const Split<T> split(values.as<const T>(), count);
    blocks = int(std::clamp<int64_t>((split.num_vectors - 1) / kThreads + 1, 1, kMaxBlocks));
    squares_kernel<<<blocks, kThreads, 0, stream>>>(split, block_sums);
    check_launch("squares_kernel");
  });
  add_sums_kernel<<<1, kThreads, 0, stream>>>(block_sums, blocks, totals + index);
  check_launch("add_sums_kernel");
}

}  // namespace tandem::gpu
