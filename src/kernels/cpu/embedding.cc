#include "kernels/cpu/kernels.h"

#include <algorithm>
#include <cstring>
#include <vector>

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

namespace {

/// Positions whose token has a row in the table, by row, in order within one.
std::vector<int64_t> by_row(const Tensor& tokens, int64_t begin, int64_t rows) {
  const auto* const all = tokens.as<int32_t>();
  std::vector<int64_t> positions;
  for (int64_t i = 0; i < tokens.dim(0); ++i) {
    if (all[i] >= begin && all[i] < begin + rows) positions.push_back(i);
  }
  std::ranges::stable_sort(positions, {}, [all](int64_t i) { return all[i]; });
  return positions;
}

}  // namespace

void embedding_backward(const Tensor& tokens, const Tensor& dout, int64_t begin,
                        const Tensor& dtable) {
  const ScopedSpan span(SpanKind::compute, "embedding_backward");
  const std::vector<int64_t> positions = by_row(tokens, begin, dtable.dim(0));
  const auto* const all = tokens.as<int32_t>();
  const auto columns = size_t(dtable.dim(1));
  std::vector<float> sum(columns);
  const auto add_runs = [&]<typename T, typename D>(T, D) {
    for (size_t i = 0; i < positions.size();) {
      const int32_t token = all[positions[i]];
      D* const target = dtable.as<D>() + (token - begin) * dtable.stride(0);
      for (size_t c = 0; c < columns; ++c) sum[c] = cpu::to_f32(target[c]);
      for (; i < positions.size() && all[positions[i]] == token; ++i) {
        const T* const source = dout.as<T>() + positions[i] * dout.stride(0);
#pragma omp simd
        for (size_t c = 0; c < columns; ++c) sum[c] += cpu::to_f32(source[c]);
      }
      for (size_t c = 0; c < columns; ++c) target[c] = cpu::from_f32<D>(sum[c]);
    }
  };
  cpu::with_type(dout.dtype(), "embedding_backward", [&]<typename T>(T t) {
    cpu::with_type(dtable.dtype(), "embedding_backward", [&]<typename D>(D d) { add_runs(t, d); });
  });
}

}  // namespace tandem::cpu
