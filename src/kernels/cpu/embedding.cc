#include "kernels/cpu/kernels.h"

#include <cstring>

#include "core/cpu/scalar.h"
#include "observe/recorder.h"

namespace tandem::cpu {

void embedding_forward(const Tensor& tokens, const Tensor& table, int64_t begin,
                       const Tensor& out) {
  const ScopedSpan span(SpanKind::compute, "embedding");
  const size_t row_bytes = size_t(table.dim(1)) * size_of(table.dtype());
  for (int64_t i = 0; i < tokens.dim(0); ++i) {
    std::byte* target = out.as<std::byte>() + size_t(i) * row_bytes;
    const int64_t row = tokens.as<int32_t>()[i] - begin;
    if (row < 0 || row >= table.dim(0)) {
      std::memset(target, 0, row_bytes);
    } else {
      std::memcpy(target, table.as<std::byte>() + size_t(row) * row_bytes, row_bytes);
    }
  }
}

void embedding_backward(const Tensor& tokens, const Tensor& dout, int64_t begin,
                        const Tensor& dtable) {
  const ScopedSpan span(SpanKind::compute, "embedding_backward");
  cpu::with_type(dout.dtype(), "embedding_backward", [&]<typename T>(T) {
    for (int64_t i = 0; i < tokens.dim(0); ++i) {
      const int64_t row = tokens.as<int32_t>()[i] - begin;
      if (row < 0 || row >= dtable.dim(0)) continue;
      const T* source = dout.as<T>() + i * dout.stride(0);
      float* target = dtable.as<float>() + row * dtable.stride(0);
#pragma omp simd
      for (int64_t c = 0; c < dtable.dim(1); ++c) target[c] += cpu::to_f32(source[c]);
    }
  });
}

}  // namespace tandem::cpu
