// Our Hopper kernels of attention against the CPU's, with documents and windows.
#include "kernels/cuda/hopper_attention.h"

#include <fmt/format.h>

#include <array>
#include <functional>
#include <memory>
#include <vector>

#include "core/cuda/architecture.h"
#include "core/system/env.h"
#include "tandem/random.h"
#include "tests/gpu/attention_operands.h"

namespace tandem::test {
namespace {

using gpu::FusedAttention;

constexpr int64_t kAlignedGap = 8;  // columns after each row

bool is_hopper() {
  return gpu::architecture_of(0) == gpu::kHopper;
}

class HopperAttention : public testing::Test {
 protected:
  void SetUp() override {
    if (!has_gpus_for(1)) GTEST_SKIP() << "needs a GPU";
    if (!is_hopper()) GTEST_SKIP() << "needs sm_90";
    if (env().gpu_portable) GTEST_SKIP() << "TANDEM_GPU_PORTABLE=1";
  }
  static void run(const std::function<void(const Exec&)>& body) {
    run_gpus({1, {}, 60, 1}, [&](Communicator& comm) {
      body(Exec{device_of(comm), stream_of(comm)});
    });
  }
};

/// Position in its sequence at which each position's document begins: lengths up to `longest`.
std::vector<int32_t> draw_documents(const AttentionShape& shape, int64_t longest, uint64_t seed) {
  std::vector<int32_t> starts;
  uint64_t drawn = 0;
  for (int64_t sequence = 0; sequence < shape.batch; ++sequence) {
    int64_t begin = 0, end = 0;
    for (int64_t position = 0; position < shape.seq; ++position) {
      if (position == end) {
        begin = position;
        end = begin + 1 + int64_t(uniform(seed, 0, drawn++) * float(longest));
      }
      starts.push_back(int32_t(begin));
    }
  }
  return starts;
}

struct Case {
  AttentionShape shape;
  int64_t window = 0;
  int64_t longest = 0;  // document; 0: sequences are whole
};

/// One attention with its operands and mask on a device.
struct Call {
  Call(const Exec& exec_, const Case& c)
      : exec(exec_),
        shape(c.shape),
        rope(exec, c.shape.seq, c.shape.head_dim, kTheta),
        operands(exec, c.shape, DType::bf16, kAlignedGap),
        starts(size_t(c.shape.batch * c.shape.seq) * sizeof(int32_t), exec.device) {
    mask.window = c.window;
    if (c.longest == 0) return;
    const std::vector<int32_t> drawn = draw_documents(c.shape, c.longest, 5);
    const auto size = int64_t(drawn.size());
    mask.document_starts = starts.view(DType::i32, {1, size});
    copy(exec, Tensor::of(std::span(drawn), {1, size}), mask.document_starts);
    wait(exec);
  }

  void forward(FusedAttention& attention) const {
    const Operands& o = operands;
    attention.forward(exec, o.q(o.qkv), o.k(o.qkv), o.v(o.qkv), o.heads(o.out),
                      o.log_sums_of(o.log_sums), mask);
  }
  void backward(FusedAttention& attention) const {
    const Operands& o = operands;
    const Tensor q = o.q(o.qkv), k = o.k(o.qkv), v = o.v(o.qkv), out = o.heads(o.out),
                 log_sums = o.log_sums_of(o.log_sums), dout = o.heads(o.dout), dq = o.q(o.dqkv),
                 dk = o.k(o.dqkv), dv = o.v(o.dqkv);
    attention.backward(exec, {q, k, v, out, log_sums, dout, dq, dk, dv}, mask);
  }

  Exec exec;
  AttentionShape shape;
  RopeTable rope;
  Operands operands;
  Memory starts;
  AttentionMask mask;
};

std::string describe(const Case& c) {
  const AttentionShape& s = c.shape;
  return fmt::format("batch {} seq {} heads {}/{} head_dim {} window {} documents up to {}",
                     s.batch, s.seq, s.heads, s.kv_heads, s.head_dim, c.window, c.longest);
}

void expect_matches_cpu(const Exec& exec, const Case& c) {
  SCOPED_TRACE(describe(c));
  // Rows of few keys have few rounding errors to average.
  const bool has_few = (c.window > 0 && c.window < 64) || (c.longest > 0 && c.longest < 300);
  const double bound = (has_few ? 2 : 1) * kRowBound;
  Call expected(Exec{}, c);
  Attention reference(Exec{}, c.shape, expected.rope);
  expected.operands.forward(reference, expected.mask);
  expected.operands.backward(reference, expected.mask);

  Call first(exec, c), second(exec, c);
  const auto attention =
      gpu::make_hopper_attention(exec, c.shape, first.rope, first.operands.strides());
  first.forward(*attention);
  second.forward(*attention);
  const Operands& o = first.operands;
  const Memory out = copied(exec, o.out), log_sums = copied(exec, o.log_sums);
  EXPECT_TRUE(same_bits(out, copied(exec, second.operands.out)));
  EXPECT_TRUE(same_bits(log_sums, copied(exec, second.operands.log_sums)));
  EXPECT_LE(row_error(o.heads(out), o.heads(expected.operands.out)), bound) << "out";
  double off = 0;
  for (int64_t i = 0; i < c.shape.batch * c.shape.heads * c.shape.seq; ++i) {
    off = std::max(off, std::fabs(value(o.log_sums_of(log_sums), i, 0) -
                                  value(o.log_sums_of(expected.operands.log_sums), i, 0)));
  }
  EXPECT_LE(off, 2 * kU) << "log_sums";

  // From the CPU's results: both forms define log_sums alike.
  for (Call* each : {&first, &second}) {
    each->operands.out = copied(exec, expected.operands.out, exec.device);
    each->operands.log_sums = copied(exec, expected.operands.log_sums, exec.device);
    each->backward(*attention);
  }
  const Memory dqkv = copied(exec, o.dqkv);
  EXPECT_TRUE(same_bits(dqkv, copied(exec, second.operands.dqkv)));
  EXPECT_LE(row_error(o.q(dqkv), o.q(expected.operands.dqkv)), bound) << "dq";
  EXPECT_LE(row_error(o.k(dqkv), o.k(expected.operands.dqkv)), bound) << "dk";
  EXPECT_LE(row_error(o.v(dqkv), o.v(expected.operands.dqkv)), bound) << "dv";
}

// Every pair of a length and numbers of heads, both head sizes.
TEST_F(HopperAttention, WholeSequencesMatchTheCpu) {
  constexpr std::array<std::array<int64_t, 2>, 4> kHeads{{{1, 1}, {4, 4}, {8, 2}, {8, 1}}};
  constexpr std::array<int64_t, 9> kSeqs{1, 2, 63, 64, 65, 128, 129, 200, 513};
  run([&](const Exec& exec) {
    for (size_t i = 0; i < 36; ++i) {
      const auto& [heads, kv_heads] = kHeads[i % 4];
      const int64_t head_dim = i / 4 % 2 == 0 ? 128 : 64;
      expect_matches_cpu(exec, {{1 + int64_t(i % 3), kSeqs[i % 9], heads, kv_heads, head_dim}});
    }
  });
}

TEST_F(HopperAttention, DocumentsAndWindowsMatchTheCpu) {
  constexpr std::array<std::array<int64_t, 2>, 3> kHeads{{{1, 1}, {4, 2}, {8, 1}}};
  constexpr std::array<int64_t, 4> kSeqs{100, 256, 513, 700};
  run([&](const Exec& exec) {
    size_t i = 0;
    for (const int64_t longest : {1, 20, 130, 400, 5000}) {
      for (const int64_t window : {0, 1, 17, 64, 129, 300}) {
        const auto& [heads, kv_heads] = kHeads[i % 3];
        const int64_t head_dim = i % 2 == 0 ? 128 : 64;
        expect_matches_cpu(
            exec, {{1 + int64_t(i % 2), kSeqs[i % 4], heads, kv_heads, head_dim}, window, longest});
        ++i;
      }
    }
  });
}

// Without a document's border the results differ: the comparison sees documents.
TEST_F(HopperAttention, DocumentsChangeTheResults) {
  run([](const Exec& exec) {
    const Case whole{{1, 256, 4, 2, 128}}, divided{{1, 256, 4, 2, 128}, 0, 100};
    Call a(exec, whole), b(exec, divided);
    const auto attention =
        gpu::make_hopper_attention(exec, whole.shape, a.rope, a.operands.strides());
    a.forward(*attention);
    b.forward(*attention);
    EXPECT_GT(row_error(a.operands.heads(copied(exec, a.operands.out)),
                        a.operands.heads(copied(exec, b.operands.out))),
              10 * kRowBound);
  });
}

void expect_is_chosen(const Exec& exec, int64_t longest) {
  const Case c{{1, 300, 4, 2, 64}, 0, longest};
  SCOPED_TRACE(describe(c));
  const Call direct(exec, c), chosen(exec, c);
  const auto expected =
      gpu::make_hopper_attention(exec, c.shape, direct.rope, direct.operands.strides());
  direct.forward(*expected);
  direct.backward(*expected);
  Attention attention(exec, c.shape, chosen.rope, chosen.operands.strides());
  const Operands& o = chosen.operands;
  o.forward(attention, chosen.mask);
  const Memory out = copied(exec, o.out), log_sums = copied(exec, o.log_sums);
  attention.forward_again(exec, o.q(o.qkv), o.k(o.qkv), o.v(o.qkv), o.heads(o.out),
                          o.log_sums_of(o.log_sums), chosen.mask);
  EXPECT_TRUE(same_bits(copied(exec, o.out), out));
  EXPECT_TRUE(same_bits(copied(exec, o.log_sums), log_sums));
  o.backward(attention, chosen.mask);
  EXPECT_TRUE(same_bits(out, copied(exec, direct.operands.out)));
  EXPECT_TRUE(same_bits(copied(exec, o.dqkv), copied(exec, direct.operands.dqkv)));
}

TEST_F(HopperAttention, IsChosen) {
  run([](const Exec& exec) {
    expect_is_chosen(exec, 0);
    expect_is_chosen(exec, 90);
  });
}

TEST_F(HopperAttention, WritesNothingBetweenRows) {
  run([](const Exec& exec) {
    const Case c{{2, 65, 4, 2, 64}, 0, 30};
    const Call call(exec, c), untouched(Exec{}, c);
    const Operands &o = call.operands, &before = untouched.operands;
    const auto attention = gpu::make_hopper_attention(exec, c.shape, call.rope, o.strides());
    call.forward(*attention);
    call.backward(*attention);
    const Memory qkv = copied(exec, o.qkv), out = copied(exec, o.out), dout = copied(exec, o.dout),
                 dqkv = copied(exec, o.dqkv);
    EXPECT_EQ(relative_error(o.gap_of_qkv(qkv), o.gap_of_qkv(before.qkv)), 0);
    EXPECT_EQ(relative_error(o.v(qkv), o.v(before.qkv)), 0);
    EXPECT_EQ(relative_error(o.gap_of_out(out), o.gap_of_out(before.out)), 0);
    EXPECT_EQ(relative_error(o.gap_of_qkv(dqkv), o.gap_of_qkv(before.dqkv)), 0);
    EXPECT_TRUE(same_bits(dout, before.dout));
  });
}

// A block waits for the shares of the one before: more blocks than the GPU runs at once.
TEST_F(HopperAttention, ManyBlocksRepeatTheirBits) {
  run([](const Exec& exec) {
    const Case c{{2, 6000, 8, 8, 128}};
    Call first(exec, c), second(exec, c);
    const auto attention =
        gpu::make_hopper_attention(exec, c.shape, first.rope, first.operands.strides());
    for (Call* each : {&first, &second}) {
      each->forward(*attention);
      each->backward(*attention);
    }
    EXPECT_TRUE(same_bits(copied(exec, first.operands.dqkv), copied(exec, second.operands.dqkv)));
  });
}

TEST_F(HopperAttention, SaysWhatItDoesNotTake) {
  run([](const Exec&) {
    const AttentionShape shape{1, 64, 2, 2, 64};
    const auto refusal = [](const AttentionShape& s, const AttentionRows& rows) {
      return gpu::why_not_hopper_attention(s, rows);
    };
    EXPECT_EQ(refusal(shape, {DType::bf16, 384, 128}), "");
    EXPECT_EQ(refusal(shape, {DType::f32, 384, 128}), "f32: fused kernels take bf16");
    EXPECT_EQ(refusal(shape, {DType::bf16, 387, 128}),
              "rows of 387 and 128 elements: fused kernels take multiples of 8");
    EXPECT_EQ(refusal({1, 64, 2, 2, 80}, {DType::bf16, 480, 160}),
              "head_dim 80: Hopper kernels take 64 and 128");
  });
}

// The counter of queries is ready for the next launch.
TEST_F(HopperAttention, RepeatedForwardPassesAreEqual) {
  run([](const Exec& exec) {
    const Case c{{3, 4000, 8, 2, 64}};
    const Call call(exec, c);
    const auto attention =
        gpu::make_hopper_attention(exec, c.shape, call.rope, call.operands.strides());
    const Operands& o = call.operands;
    const auto run_again = [&] {
      attention->forward_again(exec, o.q(o.qkv), o.k(o.qkv), o.v(o.qkv), o.heads(o.out),
                               o.log_sums_of(o.log_sums), call.mask);
      return copied(exec, o.out);
    };
    call.forward(*attention);
    const Memory first = copied(exec, o.out);
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(same_bits(run_again(), first));
  });
}

}  // namespace
}  // namespace tandem::test
