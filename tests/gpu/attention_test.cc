// Attention on a GPU against the CPU's: every dtype x head size x number of heads x tails of tiles,
// with strided rows; equal bits each time.
#include "kernels/attention.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <string>

#include "core/random_buffer.h"
#include "tests/gpu/gpu_ranks.h"

namespace tandem::test {
namespace {

constexpr double kTheta = 100;
constexpr int kGap = 3;  // columns after each row: rows are not aligned, and random values differ

double value(const Tensor& tensor, int64_t row, int64_t column) {
  const int64_t i = row * tensor.stride(0) + column;
  return tensor.dtype() == DType::f32 ? double(tensor.as<float>()[i])
                                      : double(tensor.as<BFloat16>()[i].to_float());
}

/// max |actual - expected| relative to max |expected|. A floor replaces that of gradients that are
/// 0 but for rounding, as with one key, whose weight is 1 for any q and k.
double relative_error(const Tensor& actual, const Tensor& expected) {
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

bool same_bits(const Memory& a, const Memory& b) {
  return a.bytes() == b.bytes() && std::memcmp(a.data(), b.data(), a.bytes()) == 0;
}

/// Operands of one case in the memory of a device. Outputs start with random values.
class Operands {
 public:
  Operands(const Exec& exec, const AttentionShape& shape, DType dtype)
      : exec_(exec),
        dtype_(dtype),
        rows_(shape.batch * shape.seq),
        wide_(shape.heads * shape.head_dim),
        narrow_(shape.kv_heads * shape.head_dim),
        log_sums_(rows_ * shape.heads),
        qkv(filled(qkv_columns(), 1)),
        dqkv(filled(qkv_columns(), 2)),
        out(filled(wide_ + kGap, 3)),
        dout(filled(wide_ + kGap, 4)),
        log_sums(size_t(log_sums_) * sizeof(float), exec.device) {}

  void forward(Attention& attention) const {
    attention.forward(exec_, q(qkv), k(qkv), v(qkv), heads(out), log_sums_of(log_sums));
  }
  void backward(Attention& attention) const {
    attention.backward(exec_, q(qkv), k(qkv), v(qkv), heads(out), log_sums_of(log_sums),
                       heads(dout), q(dqkv), k(dqkv), v(dqkv));
  }

  // Views of this memory or a copy of it.
  Tensor q(const Memory& memory) const { return qkv_view(memory).narrow(1, 0, wide_); }
  Tensor k(const Memory& memory) const { return qkv_view(memory).narrow(1, wide_, narrow_); }
  Tensor v(const Memory& memory) const {
    return qkv_view(memory).narrow(1, wide_ + narrow_, narrow_);
  }
  Tensor heads(const Memory& memory) const {
    return memory.view(dtype_, {rows_, wide_ + kGap}).narrow(1, 0, wide_);
  }
  Tensor log_sums_of(const Memory& memory) const { return memory.view(DType::f32, {log_sums_, 1}); }
  /// Columns of no head.
  Tensor gap_of_out(const Memory& memory) const {
    return memory.view(dtype_, {rows_, wide_ + kGap}).narrow(1, wide_, kGap);
  }
  Tensor gap_of_qkv(const Memory& memory) const {
    return qkv_view(memory).narrow(1, qkv_columns() - kGap, kGap);
  }

 private:
  int64_t qkv_columns() const { return wide_ + 2 * narrow_ + kGap; }
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
  int64_t rows_, wide_, narrow_, log_sums_;

 public:
  Memory qkv, dqkv, out, dout, log_sums;
};

Memory copied(const Exec& exec, const Memory& from, Device device = {}) {
  Memory to(from.bytes(), device);
  const auto bytes = [](const Memory& m) { return m.view(DType::u8, {int64_t(m.bytes())}); };
  copy(exec, bytes(from), bytes(to));
  return to;
}

class GpuAttention : public testing::TestWithParam<DType> {
 protected:
  void SetUp() override {
    if (!has_gpus_for(1)) GTEST_SKIP() << "needs a GPU";
  }
  static void run(const std::function<void(const Exec&)>& body) {
    run_gpus({1, {}, 20, 1}, [&](Communicator& comm) {
      body(Exec{device_of(comm), stream_of(comm)});
    });
  }
};

INSTANTIATE_TEST_SUITE_P(DTypes, GpuAttention, testing::Values(DType::f32, DType::bf16),
                         [](const auto& test) { return std::string(name_of(test.param)); });

void expect_matches_cpu(const Exec& exec, const AttentionShape& shape, DType dtype) {
  SCOPED_TRACE(fmt::format("batch {} seq {} heads {}/{} head_dim {}", shape.batch, shape.seq,
                           shape.heads, shape.kv_heads, shape.head_dim));
  const double tolerance = dtype == DType::f32 ? 1e-5 : 0x1p-7;
  const RopeTable host_rope(Exec{}, shape.seq + 1, shape.head_dim, kTheta);
  const RopeTable rope(exec, shape.seq + 1, shape.head_dim, kTheta);
  Attention reference(Exec{}, shape, host_rope), attention(exec, shape, rope);
  const Operands expected(Exec{}, shape, dtype);
  expected.forward(reference);
  expected.backward(reference);

  Operands first(exec, shape, dtype), second(exec, shape, dtype);
  first.forward(attention);
  second.forward(attention);
  const Memory out = copied(exec, first.out), log_sums = copied(exec, first.log_sums);
  EXPECT_TRUE(same_bits(out, copied(exec, second.out)));
  EXPECT_TRUE(same_bits(log_sums, copied(exec, second.log_sums)));
  const auto expect_near = [&](const char* name, const Tensor& actual, const Tensor& wanted,
                               double max_error) {
    EXPECT_LE(relative_error(actual, wanted), max_error) << name;
  };
  expect_near("out", first.heads(out), first.heads(expected.out), tolerance);
  expect_near("log_sums", first.log_sums_of(log_sums), first.log_sums_of(expected.log_sums), 1e-5);

  // From the CPU's results: otherwise bf16's rounding of `out` would count twice.
  for (Operands* operands : {&first, &second}) {
    operands->out = copied(exec, expected.out, exec.device);
    operands->log_sums = copied(exec, expected.log_sums, exec.device);
    operands->backward(attention);
  }
  const Memory dqkv = copied(exec, first.dqkv);
  EXPECT_TRUE(same_bits(dqkv, copied(exec, second.dqkv)));
  expect_near("dq", first.q(dqkv), first.q(expected.dqkv), tolerance);
  expect_near("dk", first.k(dqkv), first.k(expected.dqkv), tolerance);
  expect_near("dv", first.v(dqkv), first.v(expected.dqkv), tolerance);
}

TEST_P(GpuAttention, MatchesTheCpuAndRepeatsItsBits) {
  constexpr int64_t kHeads[][2] = {{1, 1}, {4, 4}, {4, 2}, {6, 1}};
  run([&](const Exec& exec) {
    int64_t cases = 0;
    for (const int64_t head_dim : {2, 16, 64, 80, 128}) {
      for (const auto& [heads, kv_heads] : kHeads) {
        for (const int64_t seq : {1, 2, 63, 64, 65, 200, 513}) {
          const int64_t batch = 1 + cases++ % 3;
          expect_matches_cpu(exec, {batch, seq, heads, kv_heads, head_dim}, GetParam());
        }
      }
    }
  });
}

TEST_P(GpuAttention, WritesNothingBetweenRows) {
  run([&](const Exec& exec) {
    const AttentionShape shape{2, 65, 4, 2, 80};
    const RopeTable rope(exec, shape.seq, shape.head_dim, kTheta);
    Attention attention(exec, shape, rope);
    const Operands operands(exec, shape, GetParam()), untouched(Exec{}, shape, GetParam());
    operands.forward(attention);
    operands.backward(attention);
    const Memory out = copied(exec, operands.out), dqkv = copied(exec, operands.dqkv);
    EXPECT_EQ(relative_error(operands.gap_of_out(out), operands.gap_of_out(untouched.out)), 0);
    EXPECT_EQ(relative_error(operands.gap_of_qkv(dqkv), operands.gap_of_qkv(untouched.dqkv)), 0);
  });
}

TEST_P(GpuAttention, RefusesOtherHeadSizesAndDTypes) {
  run([](const Exec& exec) {
    const RopeTable rope(exec, 8, 2, kTheta);
    for (const int64_t head_dim : {0, 1, 3, 127, 130, 256}) {
      const AttentionShape shape{1, 8, 1, 1, head_dim};
      EXPECT_THROW(Attention(exec, shape, rope), Unsupported) << head_dim;
    }
    const AttentionShape shape{1, 8, 1, 1, 2};
    const Memory memory(256, exec.device);
    const Tensor f16 = memory.view(DType::f16, {8, 2}), sums = memory.view(DType::f32, {1, 8});
    Attention attention(exec, shape, rope);
    EXPECT_THROW(attention.forward(exec, f16, f16, f16, f16, sums), InvalidArgument);
  });
}

}  // namespace
}  // namespace tandem::test
