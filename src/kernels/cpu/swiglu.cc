#include "kernels/cpu/kernels.h"

#include "core/cpu/parallel.h"
#include "core/cpu/scalar.h"
#include "observe/recorder.h"

namespace tandem::cpu {
namespace {

template <typename T>
void forward_row(const T* gate, const T* up, int64_t n, T* out) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float g = cpu::to_f32(gate[i]);
    out[i] = cpu::from_f32<T>(g * cpu::sigmoid(g) * cpu::to_f32(up[i]));
  }
}

template <typename T>
void backward_row(const T* gate, const T* up, const T* dout, int64_t n, T* dgate, T* dup) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float g = cpu::to_f32(gate[i]), d = cpu::to_f32(dout[i]), s = cpu::sigmoid(g);
    dgate[i] = cpu::from_f32<T>(d * cpu::to_f32(up[i]) * s * (1 + g * (1 - s)));
    dup[i] = cpu::from_f32<T>(d * g * s);
  }
}

}  // namespace

void swiglu_forward(const Tensor& gate, const Tensor& up, const Tensor& out) {
  const ScopedSpan span(SpanKind::compute, "swiglu");
  cpu::with_type(out.dtype(), "swiglu", [&]<typename T>(T) {
    cpu::parallel_ranges(gate.dim(0), cpu::kMinRows, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        forward_row(gate.as<T>() + row * gate.stride(0), up.as<T>() + row * up.stride(0),
                    gate.dim(1), out.as<T>() + row * out.stride(0));
      }
    });
  });
}

void swiglu_backward(const Tensor& gate, const Tensor& up, const Tensor& dout, const Tensor& dgate,
                     const Tensor& dup) {
  const ScopedSpan span(SpanKind::compute, "swiglu_backward");
  cpu::with_type(dout.dtype(), "swiglu_backward", [&]<typename T>(T) {
    cpu::parallel_ranges(gate.dim(0), cpu::kMinRows, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        backward_row(gate.as<T>() + row * gate.stride(0), up.as<T>() + row * up.stride(0),
                     dout.as<T>() + row * dout.stride(0), gate.dim(1),
                     dgate.as<T>() + row * dgate.stride(0), dup.as<T>() + row * dup.stride(0));
      }
    });
  });
}

}  // namespace tandem::cpu
