#include <algorithm>
#include <cmath>

#include "core/cpu/parallel.h"
#include "kernels/cpu/attention_rows.h"
#include "kernels/cpu/kernels.h"
#include "observe/recorder.h"

namespace tandem::cpu {
namespace {

/// Log of the sum of e^x and e^y.
float log_add(float x, float y) {
  return std::max(x, y) + std::log1p(std::exp(-std::abs(x - y)));
}

}  // namespace

void add_sinks(const Tensor& sinks, const Tensor& out, const Tensor& log_sums) {
  const ScopedSpan span(SpanKind::compute, "sinks");
  const int64_t heads = sinks.elements(), head_dim = out.dim(1) / heads, seq = log_sums.dim(1);
  with_type(out.dtype(), "sinks", [&]<typename T>(T) {
    parallel_ranges(out.dim(0), kMinRows, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        for (int64_t head = 0; head < heads; ++head) {
          float& log_sum = *at_mutable<float>(log_sums, row / seq * heads + head, row % seq);
          const float sum = log_add(log_sum, sinks.as<float>()[head]);
          const float share = std::exp(log_sum - sum);
          log_sum = sum;
          T* const x = at_mutable<T>(out, row, head * head_dim);
#pragma omp simd
          for (int64_t d = 0; d < head_dim; ++d) x[d] = from_f32<T>(share * to_f32(x[d]));
        }
      }
    });
  });
}

void sinks_backward(const Tensor& sinks, const Tensor& out, const Tensor& log_sums,
                    const Tensor& dout, const Tensor& dsinks, bool accumulate) {
  const ScopedSpan span(SpanKind::compute, "sinks_backward");
  const int64_t heads = sinks.elements(), head_dim = out.dim(1) / heads, seq = log_sums.dim(1);
  with_type(out.dtype(), "sinks_backward", [&]<typename T>(T) {
    parallel_ranges(heads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t head = begin; head < end; ++head) {
        double sum = 0;  // one thread: its order is fixed
        for (int64_t row = 0; row < out.dim(0); ++row) {
          const float log_sum = *at<float>(log_sums, row / seq * heads + head, row % seq);
          const float share = std::exp(sinks.as<float>()[head] - log_sum);
          sum += double(share * dot(at<T>(dout, row, head * head_dim),
                                    at<T>(out, row, head * head_dim), head_dim));
        }
        float& gradient = dsinks.as<float>()[head];
        gradient = (accumulate ? gradient : 0) - float(sum);
      }
    });
  });
}

}  // namespace tandem::cpu
