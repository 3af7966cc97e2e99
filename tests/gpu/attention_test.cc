// Attention on a GPU against the CPU's: every dtype x head size x number of heads x tails of tiles,
// with strided rows and sliding windows; equal bits each time.
#include "kernels/attention/attention.h"

#include <fmt/format.h>

#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tandem/random.h"
#include "tests/gpu/attention_operands.h"

namespace tandem::test {
namespace {

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

/// `starts`: of documents, on the host.
void expect_matches_cpu(const Exec& exec, const AttentionShape& shape, DType dtype,
                        int64_t window = 0, const std::vector<int32_t>& starts = {}) {
  SCOPED_TRACE(fmt::format("batch {} seq {} heads {}/{} head_dim {} window {}, {} starts",
                           shape.batch, shape.seq, shape.heads, shape.kv_heads, shape.head_dim,
                           window, starts.size()));
  AttentionMask host_mask(window), mask(window);
  Memory device_starts;
  if (!starts.empty()) {
    host_mask.document_starts = Tensor::of(std::span(starts), {1, int64_t(starts.size())});
    device_starts = Memory(host_mask.document_starts.bytes(), exec.device);
    mask.document_starts = device_starts.view(DType::i32, {1, int64_t(starts.size())});
    copy(exec, host_mask.document_starts, mask.document_starts);
  }
  const double tolerance = dtype == DType::f32 ? 1e-5 : 0x1p-7;
  const RopeTable host_rope(Exec{}, shape.seq + 1, shape.head_dim, kTheta);
  const RopeTable rope(exec, shape.seq + 1, shape.head_dim, kTheta);
  Attention reference(Exec{}, shape, host_rope), attention(exec, shape, rope);
  const Operands expected(Exec{}, shape, dtype);
  expected.forward(reference, host_mask);
  expected.backward(reference, host_mask);

  Operands first(exec, shape, dtype), second(exec, shape, dtype);
  first.forward(attention, mask);
  second.forward(attention, mask);
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
    operands->backward(attention, mask);
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

// Tiles have 64 keys or queries, and backward's steps 32.
TEST_P(GpuAttention, WindowsMatchTheCpuAndRepeatTheirBits) {
  constexpr int64_t kHeads[][2] = {{1, 1}, {4, 2}, {6, 1}};
  run([&](const Exec& exec) {
    int64_t cases = 0;
    for (const int64_t window : {1, 2, 31, 32, 33, 63, 64, 65, 100, 128, 191, 192, 400, 513, 600}) {
      for (const int64_t seq : {1, 63, 65, 200, 513}) {
        for (const int64_t head_dim : {16, 64, 80, 128}) {
          const auto& [heads, kv_heads] = kHeads[cases++ % 3];
          expect_matches_cpu(exec, {1 + cases % 2, seq, heads, kv_heads, head_dim}, GetParam(),
                             window);
        }
      }
    }
  });
}

// Documents of one position, shorter and longer than a tile, and with a window.
TEST_P(GpuAttention, DocumentsMatchTheCpuAndRepeatTheirBits) {
  constexpr int64_t kHeads[][2] = {{1, 1}, {4, 2}, {6, 1}};
  run([&](const Exec& exec) {
    uint64_t cases = 0;
    for (const uint32_t mean : {1, 3, 40, 70, 200}) {
      for (const int64_t seq : {1, 63, 65, 200, 513}) {
        for (const int64_t head_dim : {16, 64, 80, 128}) {
          const auto& [heads, kv_heads] = kHeads[cases++ % 3];
          const AttentionShape shape{1 + int64_t(cases % 2), seq, heads, kv_heads, head_dim};
          std::vector<int32_t> starts;
          for (int64_t i = 0; i < shape.batch * seq; ++i) {
            const bool begins = i % seq == 0 || philox(3, cases, uint64_t(i))[0] % mean == 0;
            starts.push_back(begins ? int32_t(i % seq) : starts.back());
          }
          expect_matches_cpu(exec, shape, GetParam(), cases % 4 == 0 ? 50 : 0, starts);
        }
      }
    }
  });
}

TEST_P(GpuAttention, WindowOverTheWholeSequenceHasTheBitsOfNone) {
  run([&](const Exec& exec) {
    const AttentionShape shape{2, 200, 4, 2, 64};
    const RopeTable rope(exec, shape.seq, shape.head_dim, kTheta);
    Attention attention(exec, shape, rope);
    const auto results = [&](int64_t window) {
      const Operands operands(exec, shape, GetParam());
      operands.forward(attention, window);
      operands.backward(attention, window);
      return std::pair(copied(exec, operands.out), copied(exec, operands.dqkv));
    };
    const auto whole = results(0);
    for (const int64_t window : {199, 200, 201}) {
      const auto found = results(window);
      EXPECT_EQ(same_bits(found.first, whole.first), window >= 200) << window;
      EXPECT_EQ(same_bits(found.second, whole.second), window >= 200) << window;
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
