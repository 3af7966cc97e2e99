// cuDNN's attention against the CPU's and the simple kernels, and its rotary embedding.
#include "kernels/cuda/cudnn/attention.h"

#include <fmt/format.h>

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/system/env.h"
#include "kernels/cuda/cudnn/plugin_loader.h"
#include "kernels/cuda/rope.h"
#include "tests/gpu/attention_operands.h"

namespace tandem::test {
namespace {

using gpu::FusedAttention;

constexpr int64_t kAlignedGap = 8;  // columns after each row
/// cuDNN reads q and k rounded after their rotation, rounds weights and score gradients for its
/// products, and dq and dk twice.
constexpr double kBound = kRowBound;

class CudnnAttention : public testing::Test {
 protected:
  void SetUp() override {
    if (!has_gpus_for(1)) GTEST_SKIP() << "needs a GPU";
    if (!gpu::cudnn_plugin().functions) GTEST_SKIP() << "cuDNN is " << gpu::describe_cudnn();
    if (env().gpu_portable) GTEST_SKIP() << "TANDEM_GPU_PORTABLE=1";
  }
  static void run(const std::function<void(const Exec&)>& body) {
    run_gpus({1, {}, 20, 1}, [&](Communicator& comm) {
      body(Exec{device_of(comm), stream_of(comm)});
    });
  }
};

void forward(FusedAttention& attention, const Exec& exec, const Operands& o, int64_t window = 0) {
  attention.forward(exec, o.q(o.qkv), o.k(o.qkv), o.v(o.qkv), o.heads(o.out),
                    o.log_sums_of(o.log_sums), window);
}

void backward(FusedAttention& attention, const Exec& exec, const Operands& o, int64_t window = 0) {
  const Tensor q = o.q(o.qkv), k = o.k(o.qkv), v = o.v(o.qkv), out = o.heads(o.out),
               log_sums = o.log_sums_of(o.log_sums), dout = o.heads(o.dout), dq = o.q(o.dqkv),
               dk = o.k(o.dqkv), dv = o.v(o.dqkv);
  attention.backward(exec, {q, k, v, out, log_sums, dout, dq, dk, dv}, window);
}

void expect_equal_gradients(const Operands& o, const Memory& actual, const Memory& expected,
                            double bound = kBound) {
  EXPECT_LE(row_error(o.q(actual), o.q(expected)), bound) << "dq";
  EXPECT_LE(row_error(o.k(actual), o.k(expected)), bound) << "dk";
  EXPECT_LE(row_error(o.v(actual), o.v(expected)), bound) << "dv";
}

std::string describe(const AttentionShape& s) {
  return fmt::format("batch {} seq {} heads {}/{} head_dim {}", s.batch, s.seq, s.heads, s.kv_heads,
                     s.head_dim);
}

void expect_matches_cpu(const Exec& exec, const AttentionShape& shape, int64_t window = 0) {
  SCOPED_TRACE(fmt::format("{} window {}", describe(shape), window));
  // Rows of few keys have few rounding errors to average.
  const double rows_of_few = window > 0 && window < 64 ? 2 : 1;
  const RopeTable host_rope(Exec{}, shape.seq + 1, shape.head_dim, kTheta);
  const RopeTable rope(exec, shape.seq + 1, shape.head_dim, kTheta);
  Attention reference(Exec{}, shape, host_rope);
  const Operands expected(Exec{}, shape, DType::bf16, kAlignedGap);
  expected.forward(reference, window);
  expected.backward(reference, window);

  Operands first(exec, shape, DType::bf16, kAlignedGap),
      second(exec, shape, DType::bf16, kAlignedGap);
  AttentionRows rows = first.strides();
  rows.windows = {window};
  const auto attention = gpu::make_cudnn_attention(exec, shape, rope, rows);
  ASSERT_NE(attention, nullptr);
  forward(*attention, exec, first, window);
  forward(*attention, exec, second, window);
  const Memory out = copied(exec, first.out), log_sums = copied(exec, first.log_sums);
  EXPECT_TRUE(same_bits(out, copied(exec, second.out)));
  EXPECT_TRUE(same_bits(log_sums, copied(exec, second.log_sums)));
  EXPECT_LE(row_error(first.heads(out), first.heads(expected.out)), rows_of_few * kBound);
  double off = 0;
  for (int64_t i = 0; i < shape.batch * shape.heads * shape.seq; ++i) {
    off = std::max(off, std::fabs(value(first.log_sums_of(log_sums), i, 0) -
                                  value(first.log_sums_of(expected.log_sums), i, 0)));
  }
  EXPECT_LE(off, rows_of_few * kU) << "log_sums";  // the emulation: 0.45 u

  // From the CPU's results: both forms define log_sums alike.
  for (Operands* operands : {&first, &second}) {
    operands->out = copied(exec, expected.out, exec.device);
    operands->log_sums = copied(exec, expected.log_sums, exec.device);
    backward(*attention, exec, *operands, window);
  }
  const Memory dqkv = copied(exec, first.dqkv);
  EXPECT_TRUE(same_bits(dqkv, copied(exec, second.dqkv)));
  expect_equal_gradients(first, dqkv, expected.dqkv, rows_of_few * kBound);
}

// Every pair of a head size and numbers of heads, each with two lengths.
TEST_F(CudnnAttention, MatchesTheCpuAndRepeatsItsBits) {
  constexpr std::array<int64_t, 5> kHeadDims{16, 32, 64, 80, 128};
  constexpr std::array<std::array<int64_t, 2>, 4> kHeads{{{1, 1}, {4, 4}, {8, 2}, {8, 1}}};
  constexpr std::array<int64_t, 7> kSeqs{2, 63, 64, 65, 128, 200, 513};
  run([&](const Exec& exec) {
    for (size_t i = 0; i < 40; ++i) {
      const auto& [heads, kv_heads] = kHeads[i % 4];
      expect_matches_cpu(exec,
                         {1 + int64_t(i % 3), kSeqs[i % 7], heads, kv_heads, kHeadDims[i % 5]});
    }
  });
}

TEST_F(CudnnAttention, WindowsMatchTheCpuAndRepeatTheirBits) {
  constexpr std::array<int64_t, 3> kHeadDims{16, 64, 128};
  constexpr std::array<std::array<int64_t, 2>, 4> kHeads{{{1, 1}, {4, 4}, {8, 2}, {8, 1}}};
  constexpr std::array<int64_t, 5> kSeqs{65, 128, 200, 513, 700};
  run([&](const Exec& exec) {
    size_t i = 0;
    for (const int64_t window : {1, 2, 17, 63, 64, 100, 128, 192, 300, 512, 700, 1000}) {
      for (int each = 0; each < 2; ++each, ++i) {
        const auto& [heads, kv_heads] = kHeads[i % 4];
        expect_matches_cpu(
            exec, {1 + int64_t(i % 3), kSeqs[i % 5], heads, kv_heads, kHeadDims[i % 3]}, window);
      }
    }
  });
}

// Layers with and without a window share an attention.
TEST_F(CudnnAttention, EveryWindowHasItsOwnKernels) {
  run([](const Exec& exec) {
    const AttentionShape shape{2, 200, 4, 2, 64};
    const RopeTable rope(exec, shape.seq, shape.head_dim, kTheta);
    AttentionRows rows = Operands(exec, shape, DType::bf16, kAlignedGap).strides();
    const auto made = [&](const std::vector<int64_t>& windows) {
      rows.windows = windows;
      return gpu::make_cudnn_attention(exec, shape, rope, rows);
    };
    const auto results = [&](FusedAttention& attention, int64_t window) {
      const Operands o(exec, shape, DType::bf16, kAlignedGap);
      forward(attention, exec, o, window);
      backward(attention, exec, o, window);
      return std::pair(copied(exec, o.out), copied(exec, o.dqkv));
    };
    const auto all = made({0, 50, 150}), whole = made({0});
    ASSERT_NE(all, nullptr);
    ASSERT_NE(whole, nullptr);
    for (const int64_t window : {150, 0, 50, 200}) {
      const auto one = made({window});
      ASSERT_NE(one, nullptr);
      const auto expected = results(*one, window), found = results(*all, window);
      EXPECT_TRUE(same_bits(found.first, expected.first)) << window;
      EXPECT_TRUE(same_bits(found.second, expected.second)) << window;
      const bool is_whole = window == 0 || window >= shape.seq;
      EXPECT_EQ(same_bits(found.first, results(*whole, 0).first), is_whole) << window;
    }
    const Operands o(exec, shape, DType::bf16, kAlignedGap);
    EXPECT_THROW(forward(*all, exec, o, 51), InvalidArgument);
    EXPECT_THROW(backward(*all, exec, o, 51), InvalidArgument);
  });
}

TEST_F(CudnnAttention, IsInterchangeableWithTheSimpleKernels) {
  run([](const Exec& exec) {
    const AttentionShape shape{2, 1500, 8, 2, 128};
    const RopeTable rope(exec, shape.seq, shape.head_dim, 500000);
    Operands simple(exec, shape, DType::bf16, kAlignedGap),
        fused(exec, shape, DType::bf16, kAlignedGap);
    Attention attention(exec, shape, rope);
    const auto cudnn = gpu::make_cudnn_attention(exec, shape, rope, fused.strides());
    ASSERT_NE(cudnn, nullptr);
    simple.forward(attention);
    simple.backward(attention);
    const Memory out = copied(exec, simple.out), dqkv = copied(exec, simple.dqkv);
    forward(*cudnn, exec, fused);
    backward(*cudnn, exec, fused);
    const Memory fused_out = copied(exec, fused.out);
    EXPECT_LE(row_error(fused.heads(fused_out), fused.heads(out)), kBound);
    // Results of one form in the backward pass of the other, too. Rounding of out moves every score
    // gradient of a row alike.
    simple.out = copied(exec, fused_out, exec.device);
    simple.log_sums = copied(exec, fused.log_sums, exec.device);
    simple.backward(attention);
    for (const Memory* memory : {&fused.dqkv, &simple.dqkv}) {
      const Memory actual = copied(exec, *memory);
      EXPECT_LE(relative_error(fused.q(actual), fused.q(dqkv)), kBound);
      EXPECT_LE(relative_error(fused.k(actual), fused.k(dqkv)), kBound);
      EXPECT_LE(relative_error(fused.v(actual), fused.v(dqkv)), kBound);
    }
  });
}

TEST_F(CudnnAttention, GroupsOfHeadsAndSequencesGiveTheSameGradients) {
  run([](const Exec& exec) {
    const AttentionShape shape{4, 200, 8, 4, 64};
    const RopeTable rope(exec, shape.seq, shape.head_dim, kTheta);
    const int64_t head = 2 * 2 * shape.seq * shape.seq;  // bytes of a key head's scores
    Memory whole;
    for (const int64_t limit : {16 * head, 8 * head, 2 * head, int64_t(0)}) {
      SCOPED_TRACE(fmt::format("{} bytes", limit));
      const Operands operands(exec, shape, DType::bf16, kAlignedGap);
      const auto attention =
          gpu::make_cudnn_attention(exec, shape, rope, operands.strides(), limit);
      ASSERT_NE(attention, nullptr);
      forward(*attention, exec, operands);
      backward(*attention, exec, operands);
      Memory dqkv = copied(exec, operands.dqkv);
      backward(*attention, exec, operands);
      EXPECT_TRUE(same_bits(dqkv, copied(exec, operands.dqkv)));
      if (limit == 16 * head)
        whole = std::move(dqkv);
      else
        expect_equal_gradients(operands, dqkv, whole);
    }
  });
}

TEST_F(CudnnAttention, BackwardOfAnyOrderMatchesTheDeterministicOne) {
  run([](const Exec& exec) {
    const AttentionShape shape{2, 513, 8, 2, 128};
    const RopeTable rope(exec, shape.seq, shape.head_dim, kTheta);
    std::array<Memory, 2> gradients;
    const Operands operands(exec, shape, DType::bf16, kAlignedGap);
    for (const bool deterministic : {false, true}) {
      const Operands o(exec, shape, DType::bf16, kAlignedGap);
      AttentionRows rows = o.strides();
      rows.deterministic = deterministic;
      const auto attention = gpu::make_cudnn_attention(exec, shape, rope, rows);
      ASSERT_NE(attention, nullptr);
      forward(*attention, exec, o);
      backward(*attention, exec, o);
      gradients[deterministic] = copied(exec, o.dqkv);
    }
    expect_equal_gradients(operands, gradients[0], gradients[1]);
  });
}

TEST_F(CudnnAttention, WritesNothingBetweenRows) {
  run([](const Exec& exec) {
    const AttentionShape shape{2, 65, 4, 2, 80};
    const RopeTable rope(exec, shape.seq, shape.head_dim, kTheta);
    const Operands o(exec, shape, DType::bf16, kAlignedGap),
        untouched(Exec{}, shape, DType::bf16, kAlignedGap);
    const auto attention = gpu::make_cudnn_attention(exec, shape, rope, o.strides());
    ASSERT_NE(attention, nullptr);
    forward(*attention, exec, o);
    backward(*attention, exec, o);
    const Memory qkv = copied(exec, o.qkv), out = copied(exec, o.out), dout = copied(exec, o.dout),
                 dqkv = copied(exec, o.dqkv);
    EXPECT_EQ(relative_error(o.gap_of_qkv(qkv), o.gap_of_qkv(untouched.qkv)), 0);
    EXPECT_EQ(relative_error(o.v(qkv), o.v(untouched.qkv)), 0);
    EXPECT_EQ(relative_error(o.gap_of_out(out), o.gap_of_out(untouched.out)), 0);
    EXPECT_EQ(relative_error(o.gap_of_qkv(dqkv), o.gap_of_qkv(untouched.dqkv)), 0);
    EXPECT_TRUE(same_bits(dout, untouched.dout));
  });
}

TEST_F(CudnnAttention, IsChosenByTheRows) {
  run([](const Exec& exec) {
    const AttentionShape shape{1, 64, 2, 2, 64};
    const RopeTable rope(exec, shape.seq, shape.head_dim, kTheta);
    const Operands operands(exec, shape, DType::bf16, kAlignedGap);
    const Memory projected = copied(exec, operands.qkv);
    Attention without_rows(exec, shape, rope);
    operands.forward(without_rows);
    EXPECT_TRUE(same_bits(copied(exec, operands.qkv), projected));
    Attention attention(exec, shape, rope, operands.strides());
    operands.forward(attention);  // rotates q and k in place
    EXPECT_FALSE(same_bits(copied(exec, operands.qkv), projected));
    operands.backward(attention);
  });
}

TEST_F(CudnnAttention, LeavesOtherTensorsToTheSimpleKernels) {
  run([](const Exec& exec) {
    const AttentionShape shape{1, 64, 2, 2, 64};
    const RopeTable rope(exec, shape.seq, shape.head_dim, kTheta);
    const auto made = [&](const AttentionShape& s, const AttentionRows& rows) {
      return gpu::make_cudnn_attention(exec, s, rope, rows) != nullptr;
    };
    EXPECT_TRUE(made(shape, {DType::bf16, 384, 128}));
    EXPECT_FALSE(made(shape, {DType::f32, 384, 128}));
    EXPECT_FALSE(made(shape, {DType::bf16, 387, 128}));
    EXPECT_FALSE(made(shape, {DType::bf16, 384, 131}));
    EXPECT_FALSE(made({1, 64, 2, 2, 20}, {DType::bf16, 384, 128}));
    EXPECT_FALSE(made({0, 64, 2, 2, 64}, {DType::bf16, 384, 128}));
  });
}

TEST_F(CudnnAttention, RefusesTensorsThatItWasNotMadeFor) {
  run([](const Exec& exec) {
    const AttentionShape shape{1, 64, 2, 2, 64};
    const RopeTable rope(exec, shape.seq, shape.head_dim, kTheta);
    const auto attention = gpu::make_cudnn_attention(exec, shape, rope, {DType::bf16, 384, 128});
    ASSERT_NE(attention, nullptr);
    const Memory memory(1 << 20, exec.device);
    const Tensor qkv = memory.view(DType::bf16, {64, 384}),
                 out = memory.view(DType::bf16, {64, 128}),
                 log_sums = memory.view(DType::f32, {2, 64});
    const Tensor q = qkv.narrow(1, 0, 128), k = qkv.narrow(1, 128, 128),
                 v = qkv.narrow(1, 256, 128);
    const auto refuses = [&](const char* reason, const Exec& alignment, const Tensor& from_q,
                             const Tensor& to_out) {
      EXPECT_THROW(attention->forward(alignment, from_q, k, v, to_out, log_sums, 0),
                   InvalidArgument)
          << reason;
    };
    refuses("dtype", exec, memory.view(DType::f32, {64, 384}).narrow(1, 0, 128), out);
    refuses("stride", exec, memory.view(DType::bf16, {64, 392}).narrow(1, 0, 128), out);
    refuses("alignment", exec, memory.view(DType::bf16, {64, 384}, 2).narrow(1, 0, 128), out);
    refuses("stride of out", exec, q, memory.view(DType::bf16, {64, 136}).narrow(1, 0, 128));
    refuses("read-only q", exec, q.as_read_only(), out);
    refuses("stream", Exec{exec.device, nullptr}, q, out);
  });
}

/// Rows of q and of k next to each other, with `gap` columns after them.
void expect_rotation(const Exec& exec, int64_t head_dim, int64_t heads, int64_t kv_heads) {
  SCOPED_TRACE(fmt::format("head_dim {} heads {} and {}", head_dim, heads, kv_heads));
  constexpr int64_t kBatch = 2, kSeq = 37;
  const int64_t wide = heads * head_dim, narrow = kv_heads * head_dim,
                columns = wide + narrow + kAlignedGap;
  const RopeTable rope(exec, kSeq, head_dim, kTheta);
  const Memory before = random_buffer(DType::bf16, kBatch * kSeq * columns, 7);
  const Memory memory = copied(exec, before, exec.device);
  const auto view = [&](const Memory& m) { return m.view(DType::bf16, {kBatch * kSeq, columns}); };
  const Tensor q = view(memory).narrow(1, 0, wide), k = view(memory).narrow(1, wide, narrow);
  gpu::rotate(exec.stream, rope, kSeq, gpu::Rotation::forward, q, k);
  const Memory rotated = copied(exec, memory);
  gpu::rotate(exec.stream, rope, kSeq, gpu::Rotation::back, q, k);
  const Memory back = copied(exec, memory);
  double off = 0, off_back = 0;
  for (int64_t row = 0; row < kBatch * kSeq; ++row) {
    for (int64_t c = 0; c < columns; ++c) {
      const double x = value(view(before), row, c);
      double expected = x;
      const int64_t i = c % head_dim, half = head_dim / 2, pair = i % half;
      if (c < wide + narrow) {
        const double angle =
            double(row % kSeq) * std::pow(kTheta, -2.0 * double(pair) / double(head_dim));
        const double partner = value(view(before), row, i < half ? c + half : c - half);
        expected = x * std::cos(angle) + (i < half ? -partner : partner) * std::sin(angle);
      }
      off = std::max(off, std::fabs(value(view(rotated), row, c) - expected));
      off_back = std::max(off_back, std::fabs(value(view(back), row, c) - x));
    }
  }
  EXPECT_LE(off, 1.001 * kU);     // of values below 2: one rounding
  EXPECT_LE(off_back, 2.5 * kU);  // sqrt(2) times one, and another
}

TEST(GpuRotation, MatchesDoublesAndTurnsBack) {
  if (!has_gpus_for(1)) GTEST_SKIP() << "needs a GPU";
  run_gpus({1, {}, 20, 1}, [&](Communicator& comm) {
    const Exec exec{device_of(comm), stream_of(comm)};
    for (const int64_t head_dim : {8, 16, 24, 64, 128}) {
      expect_rotation(exec, head_dim, 1, 1);
      expect_rotation(exec, head_dim, 8, 2);
    }
    const RopeTable rope(exec, 8, 12, kTheta);
    const Memory memory(4096, exec.device);
    const Tensor odd = memory.view(DType::bf16, {8, 12}), f32 = memory.view(DType::f32, {8, 16});
    EXPECT_THROW(gpu::rotate(exec.stream, rope, 8, gpu::Rotation::back, odd, odd), InvalidArgument);
    EXPECT_THROW(gpu::rotate(exec.stream, rope, 8, gpu::Rotation::back, f32, f32), InvalidArgument);
  });
}

}  // namespace
}  // namespace tandem::test
