// Inner loops of attention on f32 scores of a block of queries, shared by whole sequences
// (attention.cc) and blocks of them (block_attention.cc).
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "core/cpu/scalar.h"
#include "gemm/cpu/small_gemm.h"
#include "kernels/cpu/softcap.h"
#include "tandem/tensor.h"

namespace tandem::cpu {

/// Queries whose scores exist at a time.
constexpr int64_t kQueryBlock = 32;

template <typename T>
const T* at(const Tensor& t, int64_t row, int64_t column) {
  return t.as<T>() + row * t.stride(0) + column;
}
template <typename T>
T* at_mutable(const Tensor& t, int64_t row, int64_t column) {
  return t.as<T>() + row * t.stride(0) + column;
}

/// Scores [begin, end) of `padded` ones (a multiple of kLanes): masks instead of loop tails.
struct Row {
  int32_t begin, end, padded;
  Row(int64_t begin_, int64_t end_, int64_t padded_)
      : begin(int32_t(begin_)),
        end(int32_t(end_)),
        padded(int32_t(padded_ / cpu::kLanes * cpu::kLanes)) {}
  bool has(int32_t j) const { return (j >= begin) & (j < end); }
};

/// scores <- e^(scores - max), 0 outside the row; returns the sum.
inline float exponentials(float* scores, Row row, float& largest) {
  float top = std::numeric_limits<float>::lowest();
#pragma omp simd reduction(max : top)
  for (int32_t j = 0; j < row.padded; ++j) top = std::max(top, row.has(j) ? scores[j] : top);
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int32_t j = 0; j < row.padded; ++j) {
    const float e = row.has(j) ? cpu::fast_exp(scores[j] - top) : 0.0f;
    scores[j] = e;
    sum += e;
  }
  largest = top;
  return sum;
}

/// scores <- softmax, dscores <- gradient of the scores, 0 outside the row.
inline void softmax_backward(float* scores, float* dscores, Row row, float log_sum, float delta) {
#pragma omp simd
  for (int32_t j = 0; j < row.padded; ++j) {
    const float p = row.has(j) ? cpu::fast_exp(scores[j] - log_sum) : 0.0f;
    scores[j] = p;
    dscores[j] = p * (dscores[j] - delta);
  }
}

/// softmax_backward of capped scores: dscores <- gradient of the scores before the cap.
inline void capped_softmax_backward(float* scores, float* dscores, Row row, float log_sum,
                                    float delta, float cap) {
  const float inverse = 1 / cap;
#pragma omp simd
  for (int32_t j = 0; j < row.padded; ++j) {
    const float derivative = cap_derivative(scores[j], inverse);
    const float p = row.has(j) ? cpu::fast_exp(scores[j] - log_sum) : 0.0f;
    scores[j] = p;
    dscores[j] = p * (dscores[j] - delta) * derivative;
  }
}

/// Rows of one head are too far apart for the hardware prefetcher.
constexpr int64_t kPrefetchRows = 6;
template <typename T>
void prefetch(const T* row, int64_t row_stride, int64_t count) {
  const char* ahead = reinterpret_cast<const char*>(row + kPrefetchRows * row_stride);
  for (int64_t byte = 0; byte < count * int64_t(sizeof(T)); byte += 64) {
    __builtin_prefetch(ahead + byte);
  }
}

template <typename T>
float dot(const T* a, const T* b, int64_t n) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += cpu::to_f32(a[i]) * cpu::to_f32(b[i]);
  return sum;
}

}  // namespace tandem::cpu
