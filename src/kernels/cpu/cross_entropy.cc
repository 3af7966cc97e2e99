#include "kernels/cpu/kernels.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/cpu/parallel.h"
#include "core/cpu/scalar.h"
#include "observe/recorder.h"

namespace tandem::cpu {

void cross_entropy_max(const Tensor& logits, const Tensor& maxima) {
  const ScopedSpan span(SpanKind::compute, "cross_entropy");
  cpu::parallel_ranges(logits.dim(0), cpu::kMinRows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* x = logits.as<float>() + row * logits.stride(0);
      float largest = std::numeric_limits<float>::lowest();
#pragma omp simd reduction(max : largest)
      for (int64_t i = 0; i < logits.dim(1); ++i) largest = std::max(largest, x[i]);
      maxima.as<float>()[row] = largest;
    }
  });
}

void cross_entropy_sum(const Tensor& logits, const Tensor& targets, int64_t begin,
                       const Tensor& maxima, const Tensor& sums, const Tensor& picked) {
  const ScopedSpan span(SpanKind::compute, "cross_entropy");
  cpu::parallel_ranges(logits.dim(0), cpu::kMinRows, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const float* x = logits.as<float>() + row * logits.stride(0);
      const float largest = maxima.as<float>()[row];
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < logits.dim(1); ++i) sum += cpu::fast_exp(x[i] - largest);
      sums.as<float>()[row] = sum;
      const int32_t target = targets.as<int32_t>()[row];
      const int64_t column = target - begin;
      const bool ours = target >= 0 && column >= 0 && column < logits.dim(1);
      picked.as<float>()[row] = ours ? x[column] - largest : 0.0f;
    }
  });
}

void cross_entropy_loss(const Tensor& targets, const Tensor& sums, const Tensor& picked,
                        const Tensor& total) {
  double loss = 0;
  for (int64_t row = 0; row < targets.dim(0); ++row) {
    if (targets.as<int32_t>()[row] < 0) continue;
    loss += std::log(double(sums.as<float>()[row])) - double(picked.as<float>()[row]);
  }
  *total.as<double>() += loss;
}

void cross_entropy_backward(const Tensor& logits, const Tensor& targets, int64_t begin,
                            const Tensor& maxima, const Tensor& sums, float scale,
                            const Tensor& dlogits) {
  const ScopedSpan span(SpanKind::compute, "cross_entropy_backward");
  cpu::with_type(dlogits.dtype(), "cross_entropy_backward", [&]<typename T>(T) {
    cpu::parallel_ranges(logits.dim(0), cpu::kMinRows, [&](int64_t first, int64_t last) {
      const int64_t columns = logits.dim(1);
      for (int64_t row = first; row < last; ++row) {
        const float* x = logits.as<float>() + row * logits.stride(0);
        T* dx = dlogits.as<T>() + row * dlogits.stride(0);
        const int32_t target = targets.as<int32_t>()[row];
        if (target < 0) {
          std::fill_n(dx, columns, T{});
          continue;
        }
        const float largest = maxima.as<float>()[row], factor = scale / sums.as<float>()[row];
        const int64_t local = target - begin;
        const bool has_target = local >= 0 && local < columns;
        const float picked = has_target ? x[local] : 0.0f;  // dx may be x
#pragma omp simd
        for (int64_t i = 0; i < columns; ++i) {
          dx[i] = cpu::from_f32<T>(factor * cpu::fast_exp(x[i] - largest));
        }
        if (has_target) {
          dx[local] = cpu::from_f32<T>(factor * cpu::fast_exp(picked - largest) - scale);
        }
      }
    });
  });
}

}  // namespace tandem::cpu
