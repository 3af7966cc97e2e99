#include "kernels/cross_entropy.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/cpu/parallel.h"
#include "core/cpu/scalar.h"
#include "observe/recorder.h"

namespace tandem {

void cross_entropy_max(const Tensor& logits, std::span<float> maxima) {
  const ScopedSpan span(SpanKind::compute, "cross_entropy");
  cpu::parallel_ranges(logits.dim(0), cpu::kMinRows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* x = logits.as<float>() + row * logits.stride(0);
      float largest = std::numeric_limits<float>::lowest();
#pragma omp simd reduction(max : largest)
      for (int64_t i = 0; i < logits.dim(1); ++i) largest = std::max(largest, x[i]);
      maxima[size_t(row)] = largest;
    }
  });
}

void cross_entropy_sum(const Tensor& logits, std::span<const int32_t> targets, int64_t begin,
                       std::span<const float> maxima, std::span<float> sums,
                       std::span<float> picked) {
  const ScopedSpan span(SpanKind::compute, "cross_entropy");
  cpu::parallel_ranges(logits.dim(0), cpu::kMinRows, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const float* x = logits.as<float>() + row * logits.stride(0);
      const float largest = maxima[size_t(row)];
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < logits.dim(1); ++i) sum += cpu::fast_exp(x[i] - largest);
      sums[size_t(row)] = sum;
      const int64_t column = targets[size_t(row)] - begin;
      const bool ours = targets[size_t(row)] >= 0 && column >= 0 && column < logits.dim(1);
      picked[size_t(row)] = ours ? x[column] - largest : 0.0f;
    }
  });
}

double cross_entropy_loss(std::span<const int32_t> targets, std::span<const float> sums,
                          std::span<const float> picked) {
  double loss = 0;
  for (size_t row = 0; row < targets.size(); ++row) {
    if (targets[row] >= 0) loss += std::log(double(sums[row])) - double(picked[row]);
  }
  return loss;
}

void cross_entropy_backward(const Tensor& logits, std::span<const int32_t> targets, int64_t begin,
                            std::span<const float> maxima, std::span<const float> sums, float scale,
                            const Tensor& dlogits) {
  const ScopedSpan span(SpanKind::compute, "cross_entropy_backward");
  cpu::with_type(dlogits.dtype(), "cross_entropy_backward", [&]<typename T>(T) {
    cpu::parallel_ranges(logits.dim(0), cpu::kMinRows, [&](int64_t first, int64_t last) {
      const int64_t columns = logits.dim(1);
      for (int64_t row = first; row < last; ++row) {
        const float* x = logits.as<float>() + row * logits.stride(0);
        T* dx = dlogits.as<T>() + row * dlogits.stride(0);
        const int32_t target = targets[size_t(row)];
        if (target < 0) {
          std::fill_n(dx, columns, T{});
          continue;
        }
        const float largest = maxima[size_t(row)], factor = scale / sums[size_t(row)];
#pragma omp simd
        for (int64_t i = 0; i < columns; ++i) {
          dx[i] = cpu::from_f32<T>(factor * cpu::fast_exp(x[i] - largest));
        }
        const int64_t own = target - begin;
        if (own >= 0 && own < columns) {
          dx[own] = cpu::from_f32<T>(factor * cpu::fast_exp(x[own] - largest) - scale);
        }
      }
    });
  });
}

}  // namespace tandem
