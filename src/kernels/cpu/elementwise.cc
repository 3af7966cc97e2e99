#include "kernels/cpu/kernels.h"

#include "core/cpu/parallel.h"
#include "core/cpu/scalar.h"
#include "observe/recorder.h"

namespace tandem::cpu {

namespace {
constexpr int64_t kMinElements = 1 << 14;
}

void add(const Tensor& x, const Tensor& y, const Tensor& out) {
  const ScopedSpan span(SpanKind::compute, "add");
  cpu::with_type(y.dtype(), "add", [&]<typename T>(T) {
    cpu::parallel_ranges(x.dim(0), cpu::kMinRows, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const float* a = x.as<float>() + row * x.stride(0);
        const T* b = y.as<T>() + row * y.stride(0);
        float* sum = out.as<float>() + row * out.stride(0);
#pragma omp simd
        for (int64_t i = 0; i < x.dim(1); ++i) sum[i] = a[i] + cpu::to_f32(b[i]);
      }
    });
  });
}

void cast(const Tensor& from, const Tensor& to) {
  const ScopedSpan span(SpanKind::compute, "cast");
  cpu::with_type(from.dtype(), "cast", [&]<typename From>(From) {
    cpu::with_type(to.dtype(), "cast", [&]<typename To>(To) {
      cpu::parallel_ranges(from.elements(), kMinElements, [&](int64_t begin, int64_t end) {
        const From* source = from.as<From>();
        To* target = to.as<To>();
#pragma omp simd
        for (int64_t i = begin; i < end; ++i) target[i] = cpu::from_f32<To>(cpu::to_f32(source[i]));
      });
    });
  });
}

}  // namespace tandem::cpu
