#include "kernels/cpu/softcap.h"

#include "core/cpu/parallel.h"
#include "core/cpu/scalar.h"
#include "kernels/cpu/kernels.h"
#include "observe/recorder.h"

namespace tandem::cpu {

void softcap_forward(const Tensor& x, float bound) {
  const ScopedSpan span(SpanKind::compute, "softcap");
  parallel_ranges(x.dim(0), kMinRows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      cap(x.as<float>() + row * x.stride(0), x.dim(1), bound);
    }
  });
}

void softcap_backward(const Tensor& capped, float bound, const Tensor& dx) {
  const ScopedSpan span(SpanKind::compute, "softcap_backward");
  with_type(dx.dtype(), "softcap_backward", [&]<typename T>(T) {
    parallel_ranges(dx.dim(0), kMinRows, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const float* const y = capped.as<float>() + row * capped.stride(0);
        T* const d = dx.as<T>() + row * dx.stride(0);
        const float inverse = 1 / bound;
#pragma omp simd
        for (int64_t i = 0; i < dx.dim(1); ++i) {
          d[i] = from_f32<T>(to_f32(d[i]) * cap_derivative(y[i], inverse));
        }
      }
    });
  });
}

}  // namespace tandem::cpu
