// Operands of one attention in the memory of a device, and their comparison.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/random_buffer.h"
#include "kernels/attention/attention.h"
#include "tests/gpu/gpu_ranks.h"

namespace tandem::test {

constexpr double kTheta = 100;
constexpr int64_t kGap =
    3;  // columns after each row: rows are not aligned, and random values differ

inline double value(const Tensor& tensor, int64_t row, int64_t column) {
  const int64_t i = row * tensor.stride(0) + column;
  return tensor.dtype() == DType::f32 ? double(tensor.as<float>()[i])
                                      : double(tensor.as<BFloat16>()[i].to_float());
}

/// max |actual - expected| relative to max |expected|. A floor replaces that of gradients that are
/// 0 but for rounding, as with one key, whose weight is 1 for any q and k.
inline double relative_error(const Tensor& actual, const Tensor& expected) {
  double difference = 0, size = 0.1;
  for (int64_t i = 0; i < expected.dim(0); ++i) {
    for (int64_t j = 0; j < expected.dim(1); ++j) {
      const double a = value(actual, i, j), e = value(expected, i, j);
      difference = std::max(difference, std::isnan(a) ? INFINITY : std::fabs(a - e));
      size = std::max(size, std::fabs(e));
    }
  }
  return difference / size;
}

constexpr double kU = 0x1p-8;  // bf16 rounds by at most this
/// Bound of row_error for forms that read q and k rounded after their rotation, round weights and
/// score gradients for their products, and dq and dk twice. An emulation of that on values like
/// these is off by up to 3 u; the reference's own rounding adds 1 u.
constexpr double kRowBound = 6 * kU;

/// Max over rows of max |actual - expected| relative to the row's max |expected|: later queries see
/// more keys, and their results are smaller. The floor is for gradients that are 0 but for
/// rounding.
inline double row_error(const Tensor& actual, const Tensor& expected) {
  double largest = 0, error = 0;
  for (int64_t i = 0; i < expected.dim(0); ++i) {
    for (int64_t j = 0; j < expected.dim(1); ++j) {
      largest = std::max(largest, std::fabs(value(expected, i, j)));
    }
  }
  for (int64_t i = 0; i < expected.dim(0); ++i) {
    double difference = 0, size = std::max(largest / 1024, 1e-4);
    for (int64_t j = 0; j < expected.dim(1); ++j) {
      const double a = value(actual, i, j), e = value(expected, i, j);
      difference = std::max(difference, std::isnan(a) ? INFINITY : std::fabs(a - e));
      size = std::max(size, std::fabs(e));
    }
    error = std::max(error, difference / size);
  }
  return error;
}

inline bool same_bits(const Memory& a, const Memory& b) {
  return a.bytes() == b.bytes() && std::memcmp(a.data(), b.data(), a.bytes()) == 0;
}

/// Operands of one case in the memory of a device. Outputs start with random values.
class Operands {
 public:
  Operands(const Exec& exec, const AttentionShape& shape, DType dtype, int64_t gap = kGap)
      : exec_(exec),
        dtype_(dtype),
        gap_(gap),
        rows_(shape.batch * shape.seq),
        wide_(shape.heads * shape.head_dim),
        narrow_(shape.kv_heads * shape.head_dim),
        log_sums_(rows_ * shape.heads),
        qkv(filled(qkv_columns(), 1)),
        dqkv(filled(qkv_columns(), 2)),
        out(filled(wide_ + gap_, 3)),
        dout(filled(wide_ + gap_, 4)),
        log_sums(size_t(log_sums_) * sizeof(float), exec.device) {}

  AttentionRows strides() const { return {dtype_, qkv_columns(), wide_ + gap_}; }

  void forward(Attention& attention, const AttentionMask& mask = {}) const {
    attention.forward(exec_, q(qkv), k(qkv), v(qkv), heads(out), log_sums_of(log_sums), mask);
  }
  void backward(Attention& attention, const AttentionMask& mask = {}) const {
    attention.backward(exec_, q(qkv), k(qkv), v(qkv), heads(out), log_sums_of(log_sums),
                       heads(dout), q(dqkv), k(dqkv), v(dqkv), mask);
  }

  // Views of this memory or a copy of it.
  Tensor q(const Memory& memory) const { return qkv_view(memory).narrow(1, 0, wide_); }
  Tensor k(const Memory& memory) const { return qkv_view(memory).narrow(1, wide_, narrow_); }
  Tensor v(const Memory& memory) const {
    return qkv_view(memory).narrow(1, wide_ + narrow_, narrow_);
  }
  Tensor heads(const Memory& memory) const {
    return memory.view(dtype_, {rows_, wide_ + gap_}).narrow(1, 0, wide_);
  }
  Tensor log_sums_of(const Memory& memory) const { return memory.view(DType::f32, {log_sums_, 1}); }
  /// Columns of no head.
  Tensor gap_of_out(const Memory& memory) const {
    return memory.view(dtype_, {rows_, wide_ + gap_}).narrow(1, wide_, gap_);
  }
  Tensor gap_of_qkv(const Memory& memory) const {
    return qkv_view(memory).narrow(1, qkv_columns() - gap_, gap_);
  }

 private:
  int64_t qkv_columns() const { return wide_ + 2 * narrow_ + gap_; }
  Tensor qkv_view(const Memory& memory) const {
    return memory.view(dtype_, {rows_, qkv_columns()});
  }
  Memory filled(int64_t columns, uint64_t seed) const {
    Memory host = random_buffer(dtype_, rows_ * columns, seed);
    if (!exec_.on_gpu()) return host;
    Memory memory(host.bytes(), exec_.device);
    const auto all = [&](const Memory& m) { return m.view(dtype_, {rows_, columns}); };
    copy(exec_, all(host), all(memory));
    return memory;
  }

  Exec exec_;
  DType dtype_;
  int64_t gap_, rows_, wide_, narrow_, log_sums_;

 public:
  Memory qkv, dqkv, out, dout, log_sums;
};

inline Memory copied(const Exec& exec, const Memory& from, Device device = {}) {
  Memory to(from.bytes(), device);
  const auto bytes = [](const Memory& m) { return m.view(DType::u8, {int64_t(m.bytes())}); };
  copy(exec, bytes(from), bytes(to));
  return to;
}

}  // namespace tandem::test
