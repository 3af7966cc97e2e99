#include <algorithm>
#include <cmath>

#include "core/cpu/parallel.h"
#include "core/cpu/scalar.h"
#include "kernels/cpu/kernels.h"
#include "observe/recorder.h"

namespace tandem::cpu {

void add_bias(const Tensor& bias, const Tensor& rows) {
  const ScopedSpan span(SpanKind::compute, "add_bias");
  const int64_t n = rows.dim(1);
  with_type(rows.dtype(), "add_bias", [&]<typename T>(T) {
    parallel_ranges(rows.dim(0), kMinRows, [&](int64_t begin, int64_t end) {
      const float* const b = bias.as<float>();
      for (int64_t row = begin; row < end; ++row) {
        T* const x = rows.as<T>() + row * rows.stride(0);
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) x[i] = from_f32<T>(to_f32(x[i]) + b[i]);
      }
    });
  });
}

void column_sums(const Tensor& rows, const Tensor& sums, bool accumulate) {
  const ScopedSpan span(SpanKind::compute, "column_sums");
  const int64_t n = rows.dim(1);
  float* const to = sums.as<float>();
  if (!accumulate) std::fill_n(to, n, 0.0f);
  with_type(rows.dtype(), "column_sums", [&]<typename T>(T) {
    for (int64_t row = 0; row < rows.dim(0); ++row) {  // one thread: a fixed order
      const T* const x = rows.as<T>() + row * rows.stride(0);
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) to[i] += to_f32(x[i]);
    }
  });
}

void rms_norm_heads(const Tensor& weight, double eps, const Tensor& rows) {
  const ScopedSpan span(SpanKind::compute, "rms_norm_heads");
  const int64_t head_dim = weight.dim(0), heads = rows.dim(1) / head_dim;
  with_type(rows.dtype(), "rms_norm_heads", [&]<typename T>(T) {
    parallel_ranges(rows.dim(0), kMinRows, [&](int64_t begin, int64_t end) {
      const float* const w = weight.as<float>();
      for (int64_t i = begin * heads; i < end * heads; ++i) {
        T* const x = rows.as<T>() + i / heads * rows.stride(0) + i % heads * head_dim;
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int64_t d = 0; d < head_dim; ++d) squares += to_f32(x[d]) * to_f32(x[d]);
        const float scale = float(1 / std::sqrt(double(squares) / double(head_dim) + eps));
#pragma omp simd
        for (int64_t d = 0; d < head_dim; ++d) x[d] = from_f32<T>(to_f32(x[d]) * scale * w[d]);
      }
    });
  });
}

void gate_rows(const Tensor& gate, const Tensor& rows) {
  const ScopedSpan span(SpanKind::compute, "gate_rows");
  const int64_t n = rows.dim(1);
  with_type(rows.dtype(), "gate_rows", [&]<typename T>(T) {
    for (int64_t row = 0; row < rows.dim(0); ++row) {
      const float open =
          float(1 / (1 + std::exp(-double(to_f32(gate.as<T>()[row * gate.stride(0)])))));
      T* const x = rows.as<T>() + row * rows.stride(0);
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) x[i] = from_f32<T>(to_f32(x[i]) * open);
    }
  });
}

}  // namespace tandem::cpu
