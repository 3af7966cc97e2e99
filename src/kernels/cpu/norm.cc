#include "kernels/cpu/kernels.h"

#include <cmath>

#include "core/cpu/parallel.h"
#include "core/cpu/scalar.h"
#include "observe/recorder.h"

namespace tandem::cpu {
namespace {

// Returns the row's inverse RMS.
template <typename In, typename T>
float forward_row(const In* x, const In* weight, float offset, int64_t n, double eps, T* out) {
  float squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < n; ++i) squares += cpu::to_f32(x[i]) * cpu::to_f32(x[i]);
  const float scale = float(1 / std::sqrt(double(squares) / double(n) + eps));
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    out[i] = cpu::from_f32<T>(cpu::to_f32(x[i]) * scale * (offset + cpu::to_f32(weight[i])));
  }
  return scale;
}

template <typename T, typename D>
void backward_row(const float* x, const float* weight, float offset, float scale, const T* dout,
                  int64_t n, D* dx, float* dweight) {
  float dot = 0;
#pragma omp simd reduction(+ : dot)
  for (int64_t i = 0; i < n; ++i) dot += cpu::to_f32(dout[i]) * (offset + weight[i]) * x[i];
  const float along = dot * scale * scale / float(n);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float d = cpu::to_f32(dout[i]);
    dx[i] =
        cpu::from_f32<D>(cpu::to_f32(dx[i]) + scale * (d * (offset + weight[i]) - x[i] * along));
    dweight[i] += d * x[i] * scale;
  }
}

template <typename T, typename D>
void add_row(const T* dout, int64_t n, D* dx) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    dx[i] = cpu::from_f32<D>(cpu::to_f32(dx[i]) + cpu::to_f32(dout[i]));
  }
}

}  // namespace

void rms_norm_forward(const Tensor& x, const NormWeight& weight, double eps, const Tensor& out,
                      const Tensor& inverse_rms) {
  const ScopedSpan span(SpanKind::compute, "rms_norm");
  cpu::with_type(out.dtype(), "rms_norm", [&]<typename T>(T) {
    cpu::parallel_ranges(x.dim(0), cpu::kMinRows, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        inverse_rms.as<float>()[row] =
            forward_row(x.as<const float>() + row * x.stride(0), weight.values.as<const float>(),
                        weight.offset, x.dim(1), eps, out.as<T>() + row * out.stride(0));
      }
    });
  });
}

void rms_norm(const Tensor& x, const Tensor& weight, double eps, const Tensor& out) {
  cpu::with_type(out.dtype(), "rms_norm", [&]<typename T>(T) {
    cpu::parallel_ranges(x.dim(0), cpu::kMinRows, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        forward_row(x.as<T>() + row * x.stride(0), weight.as<T>(), 0, x.dim(1), eps,
                    out.as<T>() + row * out.stride(0));
      }
    });
  });
}

void rms_norm_backward(const Tensor& x, const NormWeight& weight, const Tensor& inverse_rms,
                       const Tensor& dout, const Tensor& dx, const Tensor& dweight,
                       const Tensor& dx_bf16) {
  const ScopedSpan span(SpanKind::compute, "rms_norm_backward");
  const auto add_rows = [&]<typename T, typename D>(T, D) {
    for (int64_t row = 0; row < x.dim(0); ++row) {  // one thread: rows share dweight
      D* const of_row = dx.as<D>() + row * dx.stride(0);
      const T* const d = dout.as<T>() + row * dout.stride(0);
      if (weight.has_norm()) {
        backward_row(x.as<float>() + row * x.stride(0), weight.values.as<float>(), weight.offset,
                     inverse_rms.as<float>()[row], d, x.dim(1), of_row, dweight.as<float>());
      } else {
        add_row(d, x.dim(1), of_row);
      }
      if (!dx_bf16.data()) continue;
      BFloat16* to = dx_bf16.as<BFloat16>() + row * dx_bf16.stride(0);
#pragma omp simd
      for (int64_t i = 0; i < x.dim(1); ++i) {
        to[i] = cpu::from_f32<BFloat16>(cpu::to_f32(of_row[i]));
      }
    }
  };
  cpu::with_type(dout.dtype(), "rms_norm_backward", [&]<typename T>(T t) {
    cpu::with_type(dx.dtype(), "rms_norm_backward", [&]<typename D>(D d) { add_rows(t, d); });
  });
}

}  // namespace tandem::cpu
