#include <algorithm>
#include <cmath>

#include "core/cpu/parallel.h"
#include "core/cpu/scalar.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/squares.h"
#include "observe/recorder.h"

namespace tandem::cpu {

void divided_norm_squares(const Tensor& rows, const Tensor& sums) {
  const ScopedSpan span(SpanKind::compute, "divided_norm_squares");
  const int64_t n = rows.dim(1);
  with_type(rows.dtype(), "divided_norm_squares", [&]<typename T>(T) {
    parallel_ranges(rows.dim(0), kMinRows, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        sums.as<float>()[row] = sum_of_squares(rows.as<T>() + row * rows.stride(0), n);
      }
    });
  });
}

void divided_norm_forward(const NormWeight& weight, const DividedNorm& norm, const Tensor& rows,
                          const Tensor& sums, const Tensor& unnormalized) {
  const ScopedSpan span(SpanKind::compute, "divided_norm");
  const int64_t n = rows.dim(1);
  with_type(rows.dtype(), "divided_norm", [&]<typename T>(T) {
    parallel_ranges(rows.dim(0), kMinRows, [&](int64_t begin, int64_t end) {
      const float *const w = weight.values.as<float>(), offset = weight.offset;
      for (int64_t row = begin; row < end; ++row) {
        T* const x = rows.as<T>() + row * rows.stride(0);
        if (unnormalized.dims() > 0) {
          std::copy_n(x, n, unnormalized.as<T>() + row * unnormalized.stride(0));
        }
        float& sum = sums.as<float>()[row];
        const auto scale = float(1 / std::sqrt(double(sum) / double(norm.columns) + norm.eps));
        sum = scale;
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) x[i] = from_f32<T>(to_f32(x[i]) * scale * (offset + w[i]));
      }
    });
  });
}

void divided_norm_products(const NormWeight& weight, const Tensor& unnormalized,
                           const Tensor& drows, const Tensor& sums) {
  const ScopedSpan span(SpanKind::compute, "divided_norm_products");
  const int64_t n = drows.dim(1);
  with_type(drows.dtype(), "divided_norm_products", [&]<typename T>(T) {
    parallel_ranges(drows.dim(0), kMinRows, [&](int64_t begin, int64_t end) {
      const float *const w = weight.values.as<float>(), offset = weight.offset;
      for (int64_t row = begin; row < end; ++row) {
        const T* const x = unnormalized.as<T>() + row * unnormalized.stride(0);
        const T* const d = drows.as<T>() + row * drows.stride(0);
        float dot = 0;
#pragma omp simd reduction(+ : dot)
        for (int64_t i = 0; i < n; ++i) dot += to_f32(d[i]) * (offset + w[i]) * to_f32(x[i]);
        sums.as<float>()[row] = dot;
      }
    });
  });
}

void divided_norm_backward(const NormWeight& weight, const DividedNorm& norm,
                           const Tensor& unnormalized, const Tensor& inverse_rms,
                           const Tensor& sums, const Tensor& drows, const Tensor& dweight) {
  const ScopedSpan span(SpanKind::compute, "divided_norm_backward");
  const int64_t n = drows.dim(1);
  with_type(drows.dtype(), "divided_norm_backward", [&]<typename T>(T) {
    const float *const w = weight.values.as<float>(), offset = weight.offset;
    float* const dw = dweight.as<float>();
    for (int64_t row = 0; row < drows.dim(0); ++row) {  // one thread: rows share dweight
      const T* const x = unnormalized.as<T>() + row * unnormalized.stride(0);
      T* const d = drows.as<T>() + row * drows.stride(0);
      const float scale = inverse_rms.as<float>()[row];
      const float along = sums.as<float>()[row] * scale * scale / float(norm.columns);
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) {
        const float dout = to_f32(d[i]), in = to_f32(x[i]);
        d[i] = from_f32<T>(scale * (dout * (offset + w[i]) - in * along));
        dw[i] += dout * in * scale;
      }
    }
  });
}

}  // namespace tandem::cpu
