#include <algorithm>
#include <cmath>
#include <vector>

#include "core/cpu/parallel.h"
#include "core/cpu/scalar.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/squares.h"
#include "observe/recorder.h"

namespace tandem::cpu {
namespace {

template <typename T>
float inverse_rms_of(const T* x, int64_t n, double eps) {
  return float(1 / std::sqrt(double(sum_of_squares(x, n)) / double(n) + eps));
}

/// `d`: the gradient of the normalized head, then of x.
template <typename T>
void head_norm_backward(const T* x, const NormWeight& norm, int64_t n, double eps, T* d,
                        float* dweight) {
  const float *const weight = norm.values.as<float>(), offset = norm.offset;
  const float scale = inverse_rms_of(x, n, eps);
  float dot = 0;
#pragma omp simd reduction(+ : dot)
  for (int64_t i = 0; i < n; ++i) dot += to_f32(d[i]) * (offset + weight[i]) * to_f32(x[i]);
  const float along = dot * scale * scale / float(n);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float dout = to_f32(d[i]), in = to_f32(x[i]);
    d[i] = from_f32<T>(scale * (dout * (offset + weight[i]) - in * along));
    dweight[i] += dout * in * scale;
  }
}

template <typename T>
float gate_of(const Tensor& gate, int64_t row) {
  return float(1 / (1 + std::exp(-double(to_f32(gate.as<T>()[row * gate.stride(0)])))));
}

}  // namespace

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

void rms_norm_heads(const NormWeight& weight, double eps, const Tensor& rows,
                    const Tensor& unnormalized) {
  const ScopedSpan span(SpanKind::compute, "rms_norm_heads");
  const int64_t head_dim = weight.elements(), heads = rows.dim(1) / head_dim;
  with_type(rows.dtype(), "rms_norm_heads", [&]<typename T>(T) {
    parallel_ranges(rows.dim(0), kMinRows, [&](int64_t begin, int64_t end) {
      const float *const w = weight.values.as<float>(), offset = weight.offset;
      for (int64_t i = begin * heads; i < end * heads; ++i) {
        const int64_t row = i / heads, column = i % heads * head_dim;
        T* const x = rows.as<T>() + row * rows.stride(0) + column;
        if (unnormalized.dims() > 0) {
          std::copy_n(x, head_dim, unnormalized.as<T>() + row * unnormalized.stride(0) + column);
        }
        const float scale = inverse_rms_of(x, head_dim, eps);
#pragma omp simd
        for (int64_t d = 0; d < head_dim; ++d) {
          x[d] = from_f32<T>(to_f32(x[d]) * scale * (offset + w[d]));
        }
      }
    });
  });
}

void rms_norm_heads_backward(const Tensor& unnormalized, const NormWeight& weight, double eps,
                             const Tensor& drows, const Tensor& dweight) {
  const ScopedSpan span(SpanKind::compute, "rms_norm_heads_backward");
  const int64_t head_dim = weight.elements(), heads = drows.dim(1) / head_dim;
  with_type(drows.dtype(), "rms_norm_heads_backward", [&]<typename T>(T) {
    for (int64_t i = 0; i < drows.dim(0) * heads; ++i) {  // one thread: heads share dweight
      const int64_t row = i / heads, column = i % heads * head_dim;
      head_norm_backward(unnormalized.as<T>() + row * unnormalized.stride(0) + column, weight,
                         head_dim, eps, drows.as<T>() + row * drows.stride(0) + column,
                         dweight.as<float>());
    }
  });
}

void gate_rows(const Tensor& gate, const Tensor& rows) {
  const ScopedSpan span(SpanKind::compute, "gate_rows");
  const int64_t n = rows.dim(1);
  with_type(rows.dtype(), "gate_rows", [&]<typename T>(T) {
    for (int64_t row = 0; row < rows.dim(0); ++row) {
      const float open = gate_of<T>(gate, row);
      T* const x = rows.as<T>() + row * rows.stride(0);
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) x[i] = from_f32<T>(to_f32(x[i]) * open);
    }
  });
}

void gate_rows_backward(const Tensor& gate, const Tensor& gated, const Tensor& drows,
                        const Tensor& dgate) {
  const ScopedSpan span(SpanKind::compute, "gate_rows_backward");
  const int64_t n = drows.dim(1);
  with_type(drows.dtype(), "gate_rows_backward", [&]<typename T>(T) {
    parallel_ranges(drows.dim(0), kMinRows, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const float open = gate_of<T>(gate, row);
        const T* const y = gated.as<T>() + row * gated.stride(0);
        T* const d = drows.as<T>() + row * drows.stride(0);
        float dot = 0;
#pragma omp simd reduction(+ : dot)
        for (int64_t i = 0; i < n; ++i) dot += to_f32(d[i]) * to_f32(y[i]);
        dgate.as<T>()[row * dgate.stride(0)] = from_f32<T>((1 - open) * dot);
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) d[i] = from_f32<T>(to_f32(d[i]) * open);
      }
    });
  });
}

void scale_rows(const Tensor& rows, double factor) {
  const ScopedSpan span(SpanKind::compute, "scale_rows");
  with_type(rows.dtype(), "scale_rows", [&]<typename T>(T) {
    parallel_ranges(rows.dim(0), kMinRows, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        T* const x = rows.as<T>() + row * rows.stride(0);
#pragma omp simd
        for (int64_t i = 0; i < rows.dim(1); ++i) x[i] = from_f32<T>(to_f32(x[i]) * float(factor));
      }
    });
  });
}

void permute_heads(const Tensor& rows, std::span<const int32_t> order) {
  const ScopedSpan span(SpanKind::compute, "permute_heads");
  with_type(rows.dtype(), "permute_heads", [&]<typename T>(T) {
    parallel_ranges(rows.dim(0), kMinRows, [&](int64_t begin, int64_t end) {
      std::vector<T> head(order.size());
      for (int64_t row = begin; row < end; ++row) {
        T* const x = rows.as<T>() + row * rows.stride(0);
        for (int64_t first = 0; first < rows.dim(1); first += int64_t(order.size())) {
          std::copy_n(x + first, head.size(), head.begin());
          for (size_t i = 0; i < head.size(); ++i) x[first + int64_t(i)] = head[size_t(order[i])];
        }
      }
    });
  });
}

}  // namespace tandem::cpu
