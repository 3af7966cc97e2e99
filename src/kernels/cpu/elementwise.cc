#include <algorithm>
#include <array>

#include "core/cpu/parallel.h"
#include "core/cpu/scalar.h"
#include "kernels/cpu/kernels.h"
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

void sum(std::span<const Tensor> terms, const Tensor& out) {
  constexpr int64_t kBlock = 4096;
  std::array<float, kBlock> total;
  cpu::with_type(out.dtype(), "sum", [&]<typename T>(T) {
    for (int64_t at = 0; at < out.elements(); at += kBlock) {
      const int64_t count = std::min(kBlock, out.elements() - at);
      const T* const first = terms[0].as<T>() + at;
      for (int64_t i = 0; i < count; ++i) total[size_t(i)] = cpu::to_f32(first[i]);
      for (const Tensor& term : terms.subspan(1)) {
        const T* const values = term.as<T>() + at;
        for (int64_t i = 0; i < count; ++i) total[size_t(i)] += cpu::to_f32(values[i]);
      }
      T* const to = out.as<T>() + at;
      for (int64_t i = 0; i < count; ++i) to[i] = cpu::from_f32<T>(total[size_t(i)]);
    }
  });
}

void cast(const Tensor& from, const Tensor& to) {
  if (!from.contiguous() || !to.contiguous()) {
    for (int64_t row = 0; row < from.dim(0); ++row) cast(from.rows(row, 1), to.rows(row, 1));
    return;
  }
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
