#include "kernels/clamped_swiglu.h"

#include <algorithm>

#include "core/cpu/parallel.h"
#include "core/cpu/scalar.h"
#include "observe/recorder.h"

namespace tandem {
namespace {

template <typename T>
void clamped_row(const SwigluClamp& c, const T* gate, const T* up, int64_t n, T* out) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float g = std::min(cpu::to_f32(gate[i]), c.limit),
                u = std::clamp(cpu::to_f32(up[i]), -c.limit, c.limit);
    out[i] = cpu::from_f32<T>((u + 1) * g * cpu::sigmoid(c.alpha * g));
  }
}

template <typename T>
void clamped_row_backward(const SwigluClamp& c, const T* gate, const T* up, const T* dout,
                          int64_t n, T* dgate, T* dup) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float gate_in = cpu::to_f32(gate[i]), up_in = cpu::to_f32(up[i]),
                d = cpu::to_f32(dout[i]);
    const float g = std::min(gate_in, c.limit), u = std::clamp(up_in, -c.limit, c.limit),
                s = cpu::sigmoid(c.alpha * g);
    const float d_gate = d * (u + 1) * s * (1 + c.alpha * g * (1 - s)), d_up = d * g * s;
    dgate[i] = cpu::from_f32<T>(gate_in <= c.limit ? d_gate : 0.0f);
    dup[i] = cpu::from_f32<T>(up_in >= -c.limit && up_in <= c.limit ? d_up : 0.0f);
  }
}

}  // namespace

void clamped_swiglu_forward(const SwigluClamp& clamp, const Tensor& gate, const Tensor& up,
                            const Tensor& out) {
  const ScopedSpan span(SpanKind::compute, "swiglu");
  cpu::with_type(out.dtype(), "swiglu", [&]<typename T>(T) {
    cpu::parallel_ranges(gate.dim(0), cpu::kMinRows, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        clamped_row(clamp, gate.as<T>() + row * gate.stride(0), up.as<T>() + row * up.stride(0),
                    gate.dim(1), out.as<T>() + row * out.stride(0));
      }
    });
  });
}

void clamped_swiglu_backward(const SwigluClamp& clamp, const Tensor& gate, const Tensor& up,
                             const Tensor& dout, const Tensor& dgate, const Tensor& dup) {
  const ScopedSpan span(SpanKind::compute, "swiglu_backward");
  cpu::with_type(dout.dtype(), "swiglu_backward", [&]<typename T>(T) {
    cpu::parallel_ranges(gate.dim(0), cpu::kMinRows, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        clamped_row_backward(clamp, gate.as<T>() + row * gate.stride(0),
                             up.as<T>() + row * up.stride(0), dout.as<T>() + row * dout.stride(0),
                             gate.dim(1), dgate.as<T>() + row * dgate.stride(0),
                             dup.as<T>() + row * dup.stride(0));
      }
    });
  });
}

}  // namespace tandem
