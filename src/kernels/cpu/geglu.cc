#include "core/cpu/parallel.h"
#include "core/cpu/scalar.h"
#include "kernels/cpu/kernels.h"
#include "observe/recorder.h"

namespace tandem::cpu {
namespace {

/// gelu(g) is g * sigmoid(2 u), as (1 + tanh(u)) / 2 is sigmoid(2 u); 2 u = kLinear g + kCubic g^3.
constexpr float kLinear = 1.5957691216f, kCubic = kLinear * 0.044715f;  // 2 sqrt(2 / pi)

float gelu_sigmoid(float g) {
  return sigmoid(g * (kLinear + kCubic * g * g));
}

template <typename T>
void geglu_row(const T* gate, const T* up, int64_t n, T* out) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float g = to_f32(gate[i]);
    out[i] = from_f32<T>(g * gelu_sigmoid(g) * to_f32(up[i]));
  }
}

template <typename T>
void geglu_backward_row(const T* gate, const T* up, const T* dout, int64_t n, T* dgate, T* dup) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float g = to_f32(gate[i]), d = to_f32(dout[i]), s = gelu_sigmoid(g);
    const float slope = g * (kLinear + 3 * kCubic * g * g);
    dgate[i] = from_f32<T>(d * to_f32(up[i]) * s * (1 + slope * (1 - s)));
    dup[i] = from_f32<T>(d * g * s);
  }
}

}  // namespace

void geglu_forward(const Tensor& gate, const Tensor& up, const Tensor& out) {
  const ScopedSpan span(SpanKind::compute, "geglu");
  with_type(out.dtype(), "geglu", [&]<typename T>(T) {
    parallel_ranges(gate.dim(0), kMinRows, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        geglu_row(gate.as<T>() + row * gate.stride(0), up.as<T>() + row * up.stride(0), gate.dim(1),
                  out.as<T>() + row * out.stride(0));
      }
    });
  });
}

void geglu_backward(const Tensor& gate, const Tensor& up, const Tensor& dout, const Tensor& dgate,
                    const Tensor& dup) {
  const ScopedSpan span(SpanKind::compute, "geglu_backward");
  with_type(dout.dtype(), "geglu_backward", [&]<typename T>(T) {
    parallel_ranges(gate.dim(0), kMinRows, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        geglu_backward_row(gate.as<T>() + row * gate.stride(0), up.as<T>() + row * up.stride(0),
                           dout.as<T>() + row * dout.stride(0), gate.dim(1),
                           dgate.as<T>() + row * dgate.stride(0),
                           dup.as<T>() + row * dup.stride(0));
      }
    });
  });
}

}  // namespace tandem::cpu
