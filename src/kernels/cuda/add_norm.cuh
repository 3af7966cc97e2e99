// AddNorm of one row by one block, for kernels that already hold the row's sum. The elements of
// each thread and the order in which their squares are added depend only on the row's length: every
// kernel and every rank that normalizes the same hidden row gets the same bits.
#pragma once

#include "core/cuda/element.cuh"
#include "tandem/norm.h"

namespace tandem::gpu {

constexpr int kNormThreads = 512;
constexpr int kCachedVecs = 4;  // max vectors of a row that a thread keeps in registers

/// AddNorm and its output as kernels address them: rows of `num_vecs` 16-byte vectors.
struct NormRows {
  const void* residual;
  const void* gain;
  void* hidden;
  void* out;
  int64_t rows, num_vecs;
  int columns;
  float eps;
};

inline NormRows make_norm_rows(const AddNorm& add_norm, const Tensor& out) {
  return {add_norm.residual.data(),
          add_norm.gain.data(),
          add_norm.hidden.data(),
          out.data(),
          out.dim(0),
          out.dim(1) * int64_t(size_of(out.dtype())) / 16,
          int(out.dim(1)),
          add_norm.eps};
}

/// Sum over a block of kNormThreads, returned to every thread.
__device__ inline float block_sum(float value) {
  __shared__ float of_warp[kNormThreads / 32];
  for (int offset = 16; offset; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
  __syncthreads();  // the previous row's partial sums have been read
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  float total = 0;
  for (int w = 0; w < kNormThreads / 32; ++w) total += of_warp[w];
  return total;
}

template <typename T>
__device__ inline float add_squares(const Vec<T>& vec, float squares) {
#pragma unroll
  for (int e = 0; e < Vec<T>::kElements; ++e) {
    const float value = to_float(vec.at[e]);
    squares = fmaf(value, value, squares);
  }
  return squares;
}

template <typename T>
__device__ inline Vec<T> x_norm(const Vec<T>& vec, const Vec<T>& gain, float scale) {
  Vec<T> result;
#pragma unroll
  for (int e = 0; e < Vec<T>::kElements; ++e) {
    result.at[e] = from_float<T>(to_float(vec.at[e]) * scale * to_float(gain.at[e]));
  }
  return result;
}

/// Writes row `row` of out. load_hidden(i) returns vector i of the hidden row, which is in
/// rows.hidden once that call returns; it is called once per vector, by thread i % kNormThreads.
template <typename T, typename LoadHidden>
__device__ void norm_row(const NormRows& rows, int64_t row, const LoadHidden& load_hidden) {
  const auto* gain = static_cast<const Vec<T>*>(rows.gain);
  const auto* hidden = static_cast<const Vec<T>*>(rows.hidden) + row * rows.num_vecs;
  auto* out = static_cast<Vec<T>*>(rows.out) + row * rows.num_vecs;
  constexpr int64_t kCached = int64_t(kCachedVecs) * kNormThreads;
  Vec<T> cached[kCachedVecs];
  float squares = 0;
#pragma unroll
  for (int j = 0; j < kCachedVecs; ++j) {
    const int64_t i = threadIdx.x + int64_t(j) * kNormThreads;
    if (i >= rows.num_vecs) continue;
    cached[j] = load_hidden(i);
    squares = add_squares(cached[j], squares);
  }
  for (int64_t i = threadIdx.x + kCached; i < rows.num_vecs; i += kNormThreads) {
    squares = add_squares(load_hidden(i), squares);
  }
  const float mean = __fdiv_rn(block_sum(squares), float(rows.columns));
  const float scale = __frsqrt_rn(__fadd_rn(mean, rows.eps));
#pragma unroll
  for (int j = 0; j < kCachedVecs; ++j) {
    const int64_t i = threadIdx.x + int64_t(j) * kNormThreads;
    if (i < rows.num_vecs) out[i] = x_norm(cached[j], gain[i], scale);
  }
  for (int64_t i = threadIdx.x + kCached; i < rows.num_vecs; i += kNormThreads) {
    out[i] = x_norm(hidden[i], gain[i], scale);
  }
}

}  // namespace tandem::gpu
