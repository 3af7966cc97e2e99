#include "kernels/attention/attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "gemm/gemm.h"
#include "kernels/attention/simple_attention.h"
#include "kernels/attention/sinks.h"
#include "tests/kernels/attention_reference.h"

namespace tandem {
namespace {
using namespace tandem::test;

struct Case {
  AttentionShape shape;
  bool differences;
  int64_t window = 0;
};

TEST(SimpleAttention, HasAReasonUnlessCudnnTakesTheTensors) {
  const AttentionShape shape{1, 64, 8, 2, 128};
  const AttentionRows rows{DType::bf16, 1536, 1024};
  EXPECT_EQ(why_simple_attention(shape, rows, {}), "");
  EXPECT_EQ(why_simple_attention(shape, {DType::f32, 1536, 1024}, {}),
            "f32: fused kernels take bf16");
  EXPECT_EQ(why_simple_attention(shape, rows, {.is_portable = true}), "TANDEM_GPU_PORTABLE is 1");
  EXPECT_EQ(why_simple_attention(shape, rows, {.shares_gpu = true}), "ranks share the GPU");
  EXPECT_EQ(why_simple_attention({1, 64, 8, 2, 256}, rows, {}),
            "head_dim 256: fused kernels take multiples of 8 up to 128");
  EXPECT_EQ(why_simple_attention(shape, {DType::bf16, 1532, 1024}, {}),
            "rows of 1532 and 1024 elements: fused kernels take multiples of 8");
}

TEST(SimpleAttention, ReasonIsSaidOnce) {
  ::testing::internal::CaptureStderr();
  for (const char* reason : {kDocumentsReason, "this build has no cuDNN", kDocumentsReason}) {
    note_simple_attention(reason);
  }
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(std::ranges::count(said, '\n'), 2) << said;
  EXPECT_NE(said.find("attention on GPUs: simple kernels: documents (data.document_mask): "),
            std::string::npos)
      << said;
}

class AttentionTest : public ::testing::TestWithParam<std::tuple<DType, int>> {};
INSTANTIATE_TEST_SUITE_P(DTypesThreads, AttentionTest,
                         ::testing::Combine(::testing::Values(DType::f32, DType::bf16),
                                            ::testing::Values(1, 2)),
                         [](const auto& test) {
                           return std::string(name_of(std::get<0>(test.param))) + "_threads" +
                                  std::to_string(std::get<1>(test.param));
                         });

TEST_P(AttentionTest, MatchesReferenceAndDifferences) {
  const DType dtype = std::get<0>(GetParam());
  set_kernel_threads(std::get<1>(GetParam()));
  const Case cases[] = {{{1, 1, 1, 1, 2}, true},         {{2, 5, 4, 2, 6}, true},
                        {{1, 35, 2, 1, 4}, true},        {{1, 33, 1, 1, 16}, false},
                        {{2, 100, 4, 2, 64}, false},     {{1, 65, 3, 3, 80}, false},
                        {{2, 5, 4, 2, 6}, true, 1},      {{2, 5, 4, 2, 6}, true, 3},
                        {{1, 35, 2, 1, 4}, true, 7},     {{1, 50, 2, 2, 4}, true, 16},
                        {{2, 150, 4, 2, 64}, false, 33}, {{1, 100, 1, 1, 16}, false, 99},
                        {{1, 100, 1, 1, 16}, false, 64}};
  for (const Case& c : cases) {
    const AttentionShape& s = c.shape;
    const int64_t rows = s.batch * s.seq, wide = s.heads * s.head_dim,
                  narrow = s.kv_heads * s.head_dim;
    const RopeTable rope(Exec{}, s.seq + 3, s.head_dim, kTheta);
    Matrix q(dtype, rows, wide, wide + 5), k(dtype, rows, narrow), v(dtype, rows, narrow);
    Matrix out(dtype, rows, wide, wide + 2), log_sums(DType::f32, s.batch * s.heads, s.seq);
    q.fill("q"), k.fill("k"), v.fill("v");
    Attention attention(Exec{}, s, rope);
    attention.forward(Exec{}, q.tensor, k.tensor, v.tensor, out.tensor, log_sums.tensor, c.window);
    EXPECT_LE(
        relative_error(out.values(), reference(s, q.values(), k.values(), v.values(), c.window)),
        tolerance(dtype))
        << s.seq << " window " << c.window;
    if (!c.differences) continue;

    Matrix dout(dtype, rows, wide), dq(dtype, rows, wide), dk(dtype, rows, narrow, narrow + 7),
        dv(dtype, rows, narrow);
    dout.fill("dout"), dk.fill("garbage");
    attention.backward(Exec{}, q.tensor, k.tensor, v.tensor, out.tensor, log_sums.tensor,
                       dout.tensor, dq.tensor, dk.tensor, dv.tensor, c.window);
    const auto check = [&](const Matrix& gradient, const Matrix& x, const auto& f) {
      const auto numeric = numeric_gradient(
          x.values(), [&](const Doubles& values) { return dot(f(values), dout.values()); });
      EXPECT_LE(relative_error(gradient.values(), numeric), 2 * tolerance(dtype)) << s.seq;
    };
    check(dv, v,
          [&](const Doubles& x) { return reference(s, q.values(), k.values(), x, c.window); });
    if (s.seq == 1 || c.window == 1) continue;  // one key: its weight is 1 for any q and k
    check(dq, q,
          [&](const Doubles& x) { return reference(s, x, k.values(), v.values(), c.window); });
    check(dk, k,
          [&](const Doubles& x) { return reference(s, q.values(), x, v.values(), c.window); });
  }
}

/// Tensors of a run.
struct Operands {
  Operands(DType dtype, const AttentionShape& s)
      : wide(s.heads * s.head_dim),
        narrow(s.kv_heads * s.head_dim),
        q(dtype, s.batch * s.seq, wide),
        k(dtype, s.batch * s.seq, narrow),
        v(dtype, s.batch * s.seq, narrow),
        out(dtype, s.batch * s.seq, wide),
        log_sums(DType::f32, s.batch * s.heads, s.seq),
        dout(dtype, s.batch * s.seq, wide),
        dq(dtype, s.batch * s.seq, wide),
        dk(dtype, s.batch * s.seq, narrow),
        dv(dtype, s.batch * s.seq, narrow) {}
  void run(Attention& attention, const AttentionMask& mask) {
    attention.forward(Exec{}, q.tensor, k.tensor, v.tensor, out.tensor, log_sums.tensor, mask);
    attention.backward(Exec{}, q.tensor, k.tensor, v.tensor, out.tensor, log_sums.tensor,
                       dout.tensor, dq.tensor, dk.tensor, dv.tensor, mask);
  }
  int64_t wide, narrow;
  Matrix q, k, v, out, log_sums, dout, dq, dk, dv;
};

TEST_P(AttentionTest, SinksMatchReferenceAndDifferences) {
  const DType dtype = std::get<0>(GetParam());
  set_kernel_threads(std::get<1>(GetParam()));
  const Case cases[] = {
      {{1, 1, 1, 1, 2}, true}, {{2, 5, 4, 2, 6}, true, 3}, {{2, 100, 4, 2, 64}, false, 33}};
  for (const Case& c : cases) {
    const AttentionShape& s = c.shape;
    SCOPED_TRACE(s.seq);
    const RopeTable rope(Exec{}, s.seq, s.head_dim, kTheta);
    Operands o(dtype, s);
    o.q.fill("q"), o.k.fill("k"), o.v.fill("v"), o.dout.fill("dout");
    Matrix sinks(DType::f32, 1, s.heads), dsinks(DType::f32, 1, s.heads);
    for (int64_t h = 0; h < s.heads; ++h) sinks.set(0, h, double(h) - 1.5);
    const Tensor of_heads(sinks.tensor.data(), DType::f32, {s.heads}),
        d_of_heads(dsinks.tensor.data(), DType::f32, {s.heads});
    Attention attention(Exec{}, s, rope);
    attention.forward(Exec{}, o.q.tensor, o.k.tensor, o.v.tensor, o.out.tensor, o.log_sums.tensor,
                      c.window);
    add_sinks(Exec{}, of_heads, o.out.tensor, o.log_sums.tensor);
    const auto expected = [&](const Doubles& q, const Doubles& k, const Doubles& v,
                              const Doubles& logits) {
      return reference(s, q, k, v, c.window, logits);
    };
    const Doubles q = o.q.values(), k = o.k.values(), v = o.v.values(), logits = sinks.values();
    EXPECT_LE(relative_error(o.out.values(), expected(q, k, v, logits)), 2 * tolerance(dtype));
    if (!c.differences) continue;
    attention.backward(Exec{}, o.q.tensor, o.k.tensor, o.v.tensor, o.out.tensor, o.log_sums.tensor,
                       o.dout.tensor, o.dq.tensor, o.dk.tensor, o.dv.tensor, c.window);
    dsinks.set(0, 0, 7);
    sinks_backward(Exec{}, of_heads, o.out.tensor, o.log_sums.tensor, o.dout.tensor, d_of_heads,
                   false);
    const auto check = [&](const Matrix& gradient, const Matrix& x, const auto& f) {
      const auto numeric = numeric_gradient(
          x.values(), [&](const Doubles& values) { return dot(f(values), o.dout.values()); });
      EXPECT_LE(relative_error(gradient.values(), numeric), 3 * tolerance(dtype));
    };
    check(dsinks, sinks, [&](const Doubles& x) { return expected(q, k, v, x); });
    check(o.dq, o.q, [&](const Doubles& x) { return expected(x, k, v, logits); });
    check(o.dk, o.k, [&](const Doubles& x) { return expected(q, x, v, logits); });
    check(o.dv, o.v, [&](const Doubles& x) { return expected(q, k, x, logits); });
    const Doubles once = dsinks.values();
    sinks_backward(Exec{}, of_heads, o.out.tensor, o.log_sums.tensor, o.dout.tensor, d_of_heads,
                   true);
    for (int64_t h = 0; h < s.heads; ++h) EXPECT_EQ(dsinks.get(0, h), 2 * once[size_t(h)]);
  }
}

TEST(Attention, WindowOfAllKeysGivesTheBitsOfNone) {
  const AttentionShape s{1, 90, 2, 1, 32};
  const RopeTable rope(Exec{}, s.seq, s.head_dim, kTheta);
  Matrix q(DType::f32, 90, 64), k(DType::f32, 90, 32), v(DType::f32, 90, 32);
  q.fill("q"), k.fill("k"), v.fill("v");
  Attention attention(Exec{}, s, rope);
  const auto run = [&](int64_t window) {
    Matrix out(DType::f32, 90, 64), log_sums(DType::f32, 2, 90);
    attention.forward(Exec{}, q.tensor, k.tensor, v.tensor, out.tensor, log_sums.tensor, window);
    return out.values();
  };
  EXPECT_EQ(run(90), run(0));
  EXPECT_EQ(run(1000), run(0));
  EXPECT_NE(run(89), run(0));
}

TEST(Attention, ThreadsAndRepeatsGiveTheSameBits) {
  const AttentionShape s{3, 50, 4, 2, 32};
  const RopeTable rope(Exec{}, s.seq, s.head_dim, kTheta);
  Matrix q(DType::f32, 150, 128), k(DType::f32, 150, 64), v(DType::f32, 150, 64),
      dout(DType::f32, 150, 128);
  q.fill("q"), k.fill("k"), v.fill("v"), dout.fill("dout");
  const auto run = [&](int threads) {
    set_kernel_threads(threads);
    Matrix out(DType::f32, 150, 128), log_sums(DType::f32, 12, 50), dq(DType::f32, 150, 128),
        dk(DType::f32, 150, 64), dv(DType::f32, 150, 64);
    Attention attention(Exec{}, s, rope);
    attention.forward(Exec{}, q.tensor, k.tensor, v.tensor, out.tensor, log_sums.tensor);
    attention.backward(Exec{}, q.tensor, k.tensor, v.tensor, out.tensor, log_sums.tensor,
                       dout.tensor, dq.tensor, dk.tensor, dv.tensor);
    Doubles all;
    for (const Matrix* m : {&out, &dq, &dk, &dv}) {
      const Doubles values = m->values();
      all.insert(all.end(), values.begin(), values.end());
    }
    return all;
  };
  const Doubles first = run(1);
  EXPECT_EQ(first, run(1));
  EXPECT_EQ(first, run(2));
}

Doubles rows_of(const Matrix& m, int64_t first, int64_t count) {
  Doubles rows;
  for (int64_t i = first; i < first + count; ++i) {
    for (int64_t j = 0; j < m.tensor.dim(1); ++j) rows.push_back(m.get(i, j));
  }
  return rows;
}

TEST_P(AttentionTest, DocumentsGiveTheBitsThatTheyGiveAlone) {
  const auto [dtype, threads] = GetParam();
  set_kernel_threads(threads);
  for (uint64_t trial = 0; trial < 12; ++trial) {
    const AttentionShape s{2, trial % 3 == 0 ? 9 : 150, 4, 2, trial % 2 == 0 ? 16 : 6};
    const int64_t window = trial % 4 == 3 ? 20 : 0;
    SCOPED_TRACE("trial " + std::to_string(trial));
    const RopeTable rope(Exec{}, s.seq, s.head_dim, kTheta);
    Operands all(dtype, s);
    all.q.fill("q"), all.k.fill("k"), all.v.fill("v"), all.dout.fill("dout");
    Matrix starts(DType::i32, 1, s.batch * s.seq);
    int32_t* const start = starts.tensor.as<int32_t>();
    for (int64_t i = 0; i < s.batch * s.seq; ++i) {
      const int64_t p = i % s.seq;
      const bool begins = p == 0 || philox(3, trial, uint64_t(i))[0] % (trial < 4 ? 3 : 40) == 0;
      start[i] = begins ? int32_t(p) : start[i - 1];
    }
    Attention attention(Exec{}, s, rope);
    all.run(attention, {window, starts.tensor});
    for (int64_t first = 0, end = 0; first < s.batch * s.seq; first = end) {
      for (end = first + 1; end < s.batch * s.seq && start[end] != end % s.seq;) ++end;
      const int64_t length = end - first;
      const AttentionShape one{1, length, s.heads, s.kv_heads, s.head_dim};
      Operands alone(dtype, one);
      const auto load = [&](const Matrix& from, Matrix& to) {
        for (int64_t i = 0; i < length; ++i) {
          for (int64_t j = 0; j < to.tensor.dim(1); ++j) to.set(i, j, from.get(first + i, j));
        }
      };
      load(all.q, alone.q), load(all.k, alone.k), load(all.v, alone.v), load(all.dout, alone.dout);
      Attention attention_alone(Exec{}, one, rope);
      alone.run(attention_alone, window);
      EXPECT_EQ(rows_of(all.out, first, length), alone.out.values());
      EXPECT_EQ(rows_of(all.dq, first, length), alone.dq.values());
      EXPECT_EQ(rows_of(all.dk, first, length), alone.dk.values());
      EXPECT_EQ(rows_of(all.dv, first, length), alone.dv.values());
      const int64_t sequence = first / s.seq;
      for (int64_t h = 0; h < s.heads; ++h) {
        for (int64_t i = 0; i < length; ++i) {
          EXPECT_EQ(all.log_sums.get(sequence * s.heads + h, first % s.seq + i),
                    alone.log_sums.get(h, i));
        }
      }
      EXPECT_LE(
          relative_error(alone.out.values(), reference(one, alone.q.values(), alone.k.values(),
                                                       alone.v.values(), window)),
          tolerance(dtype));
    }
  }
}

}  // namespace
}  // namespace tandem
