#include "kernels/elementwise.h"

#include <gtest/gtest.h>

#include "core/cpu/scalar.h"
#include "kernels/clamped_swiglu.h"
#include "kernels/cpu/fast_tanh.h"
#include "kernels/embedding.h"
#include "kernels/optimizer.h"
#include "kernels/softcap.h"
#include "kernels/swiglu.h"
#include "tandem/error.h"
#include "tests/kernels/reference.h"

namespace tandem {
namespace {
using namespace tandem::test;

TEST(FastExp, IsWithinTwoUlps) {
  double worst = 0;
  for (double x = -87.2; x < 88; x += 0.00037) {
    const float argument = float(x), ours = cpu::fast_exp(argument);
    const double exact = std::exp(double(argument));
    const double ulp = double(std::nextafter(float(exact), INFINITY)) - double(float(exact));
    worst = std::max(worst, std::fabs(double(ours) - exact) / ulp);
  }
  EXPECT_LE(worst, 2);
}

TEST(FastExp, EndsAreFinite) {
  EXPECT_EQ(cpu::fast_exp(0), 1);
  EXPECT_LT(cpu::fast_exp(-1e30f), 1.3e-38f);
  EXPECT_GE(cpu::fast_exp(-INFINITY), 0);
  EXPECT_TRUE(std::isfinite(cpu::fast_exp(1e30f)));
  EXPECT_TRUE(std::isnan(cpu::fast_exp(NAN)));
}

TEST(FastTanh, IsWithinEightUlpsAndOneAtItsEnds) {
  double worst = 0;
  for (double x = -12; x < 12; x += 0.00017) {
    const float argument = float(x);
    const double exact = std::tanh(double(argument));
    const double ulp =
        std::abs(double(std::nextafter(float(exact), INFINITY)) - double(float(exact)));
    worst = std::max(worst, std::fabs(double(cpu::fast_tanh(argument)) - exact) / ulp);
  }
  EXPECT_LE(worst, 8);
  EXPECT_EQ(cpu::fast_tanh(0), 0);
  EXPECT_NEAR(cpu::fast_tanh(1e-20f), 1e-20f, 1e-26f);
  EXPECT_NEAR(cpu::fast_tanh(1e30f), 1, 1e-6);
  EXPECT_NEAR(cpu::fast_tanh(-INFINITY), -1, 1e-6);
  EXPECT_TRUE(std::isnan(cpu::fast_tanh(NAN)));
}

class Elementwise : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(DTypes, Elementwise, ::testing::Values(DType::f32, DType::bf16),
                         [](const auto& test) { return std::string(name_of(test.param)); });

/// Compares a gated linear unit and its backward pass with `function` of the gate in double.
void compare_gated(DType dtype, decltype(swiglu_forward)* forward,
                   decltype(swiglu_backward)* backward, double (*function)(double)) {
  for (const auto& [rows, columns] : {std::pair{3, 5}, {130, 33}, {1, 64}, {0, 4}}) {
    Matrix gate(dtype, rows, columns, columns + 3), up(dtype, rows, columns);
    Matrix out(dtype, rows, columns), dout(dtype, rows, columns);
    Matrix dgate(dtype, rows, columns, columns + 1), dup(dtype, rows, columns);
    gate.fill("gate", 3), up.fill("up"), dout.fill("dout");
    const auto f = [&](const Doubles& g, const Doubles& u) {
      Doubles y(g.size());
      for (size_t i = 0; i < g.size(); ++i) y[i] = function(g[i]) * u[i];
      return y;
    };
    forward(Exec{}, gate.tensor, up.tensor, out.tensor);
    EXPECT_LE(relative_error(out.values(), f(gate.values(), up.values())), tolerance(dtype));
    if (rows > 3) continue;  // differences cost rows^2
    backward(Exec{}, gate.tensor, up.tensor, dout.tensor, dgate.tensor, dup.tensor);
    const auto dgate_numeric = numeric_gradient(
        gate.values(), [&](const Doubles& g) { return dot(f(g, up.values()), dout.values()); });
    const auto dup_numeric = numeric_gradient(
        up.values(), [&](const Doubles& u) { return dot(f(gate.values(), u), dout.values()); });
    EXPECT_LE(relative_error(dgate.values(), dgate_numeric), tolerance(dtype));
    EXPECT_LE(relative_error(dup.values(), dup_numeric), tolerance(dtype));
  }
}

TEST_P(Elementwise, SwigluMatchesReferenceAndDifferences) {
  compare_gated(GetParam(), swiglu_forward, swiglu_backward,
                [](double g) { return g / (1 + std::exp(-g)); });
}

TEST_P(Elementwise, GegluMatchesReferenceAndDifferences) {
  compare_gated(GetParam(), geglu_forward, geglu_backward, [](double g) {
    return g / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (g + 0.044715 * g * g * g)));
  });
}

TEST_P(Elementwise, SoftcapMatchesReferenceAndDifferences) {
  constexpr double kCap = 1.75;
  Matrix x(DType::f32, 3, 7, 9), dx(GetParam(), 3, 7, 8);
  x.fill("x", 3), dx.fill("dy");
  const auto f = [&](const Doubles& values) {
    Doubles y(values.size());
    for (size_t i = 0; i < y.size(); ++i) y[i] = kCap * std::tanh(values[i] / kCap);
    return y;
  };
  const Doubles before = x.values(), dy = dx.values();
  softcap_forward(Exec{}, x.tensor, kCap);
  EXPECT_LE(relative_error(x.values(), f(before)), tolerance(DType::f32));
  softcap_backward(Exec{}, x.tensor, kCap, dx.tensor);
  const auto numeric =
      numeric_gradient(before, [&](const Doubles& values) { return dot(f(values), dy); });
  EXPECT_LE(relative_error(dx.values(), numeric), tolerance(GetParam()));
}

TEST_P(Elementwise, ClampedSwigluMatchesReferenceAndDifferences) {
  const SwigluClamp clamp{1.5f, 1.702f};
  const auto limit = double(clamp.limit), alpha = double(clamp.alpha);
  for (const auto& [rows, columns] : {std::pair{3, 5}, {130, 33}, {1, 64}, {0, 4}}) {
    Matrix gate(GetParam(), rows, columns, columns + 3), up(GetParam(), rows, columns);
    Matrix out(GetParam(), rows, columns), dout(GetParam(), rows, columns);
    Matrix dgate(GetParam(), rows, columns, columns + 1), dup(GetParam(), rows, columns);
    gate.fill("gate", 3), up.fill("up", 3), dout.fill("dout");
    const auto f = [&](const Doubles& g, const Doubles& u) {
      Doubles y(g.size());
      for (size_t i = 0; i < g.size(); ++i) {
        const double clamped = std::min(g[i], limit);
        y[i] = (std::clamp(u[i], -limit, limit) + 1) * clamped / (1 + std::exp(-alpha * clamped));
      }
      return y;
    };
    clamped_swiglu_forward(clamp, gate.tensor, up.tensor, out.tensor);
    EXPECT_LE(relative_error(out.values(), f(gate.values(), up.values())), tolerance(GetParam()));
    if (rows > 3) continue;  // differences cost rows^2
    clamped_swiglu_backward(clamp, gate.tensor, up.tensor, dout.tensor, dgate.tensor, dup.tensor);
    const auto dgate_numeric = numeric_gradient(
        gate.values(), [&](const Doubles& g) { return dot(f(g, up.values()), dout.values()); });
    const auto dup_numeric = numeric_gradient(
        up.values(), [&](const Doubles& u) { return dot(f(gate.values(), u), dout.values()); });
    EXPECT_LE(relative_error(dgate.values(), dgate_numeric), tolerance(GetParam()));
    EXPECT_LE(relative_error(dup.values(), dup_numeric), tolerance(GetParam()));
  }
}

TEST_P(Elementwise, AddAndCastRoundOnce) {
  Matrix x(DType::f32, 70, 19), y(GetParam(), 70, 19), sum(DType::f32, 70, 19);
  Matrix narrow(GetParam(), 70, 19), back(DType::f32, 70, 19);
  x.fill("x"), y.fill("y");
  add(Exec{}, x.tensor, y.tensor, sum.tensor);
  cast(Exec{}, x.tensor, narrow.tensor);
  cast(Exec{}, narrow.tensor, back.tensor);
  for (int64_t i = 0; i < 70; ++i) {
    for (int64_t j = 0; j < 19; ++j) {
      EXPECT_EQ(float(sum.get(i, j)), float(x.get(i, j)) + float(y.get(i, j)));
      const float exact = float(x.get(i, j));
      EXPECT_EQ(float(back.get(i, j)),
                GetParam() == DType::f32 ? exact : BFloat16::from_float(exact).to_float());
    }
  }
}

// Far more terms than one sum of a step had before; the result may be in any of them.
TEST(Elementwise, SumAddsAnyNumberOfTermsInOrder) {
  constexpr size_t kCount = 4099;  // more than a block
  for (const size_t num_terms : {1, 2, 15, 16, 17, 24, 33, 300}) {
    std::vector<std::vector<float>> values(num_terms, std::vector<float>(kCount));
    std::vector<float> expected(kCount);
    for (size_t t = 0; t < num_terms; ++t) {
      for (size_t i = 0; i < kCount; ++i) {
        values[t][i] = normal(3, t, i) * float(t % 5 + 1);
        expected[i] = t == 0 ? values[t][i] : expected[i] + values[t][i];
      }
    }
    std::vector<size_t> targets{0, num_terms / 2, num_terms - 1, num_terms};  // the last: no term
    for (const size_t target : targets) {
      auto terms = values;
      terms.emplace_back(kCount);
      std::vector<Tensor> tensors;
      for (auto& term : terms) tensors.push_back(Tensor::of(std::span(term), {int64_t(kCount)}));
      sum(Exec{}, std::span(tensors).first(num_terms), tensors[target]);
      EXPECT_EQ(terms[target], expected) << num_terms << " terms into " << target;
    }
  }
  const Tensor none;
  EXPECT_THROW(sum(Exec{}, {}, none), InvalidArgument);
}

// The results in f32, rounded; the control is that roundings of partial sums change some.
TEST(Elementwise, SumsInBf16AreRoundedOnce) {
  constexpr int64_t kCount = 4099;
  std::vector<Matrix> terms, in_f32;
  for (const char* name : {"a", "b", "c"}) {
    in_f32.emplace_back(DType::f32, 1, kCount);
    cast(Exec{}, terms.emplace_back(DType::bf16, 1, kCount).fill(name).tensor,
         in_f32.back().tensor);
  }
  const auto vectors = [](const std::vector<Matrix>& of, size_t first, size_t count) {
    std::vector<Tensor> all;
    for (size_t i = first; i < first + count; ++i) {
      all.emplace_back(of[i].tensor.data(), of[i].tensor.dtype(), std::initializer_list{kCount});
    }
    return all;
  };
  Matrix out(DType::bf16, 1, kCount), exact(DType::f32, 1, kCount), twice(DType::bf16, 1, kCount);
  const auto to_vector = [](const Matrix& m) {
    return Tensor(m.tensor.data(), m.tensor.dtype(), {kCount});
  };
  sum(Exec{}, vectors(terms, 0, 3), to_vector(out));
  sum(Exec{}, vectors(in_f32, 0, 3), to_vector(exact));
  cast(Exec{}, exact.tensor, twice.tensor);
  EXPECT_EQ(out.values(), twice.values());
  sum(Exec{}, vectors(terms, 0, 2), to_vector(twice));
  const std::vector<Tensor> partial{to_vector(twice), to_vector(terms[2])};
  sum(Exec{}, partial, to_vector(twice));
  EXPECT_NE(out.values(), twice.values());
}

TEST(Elementwise, RowsOfAnEmbeddingInBf16AreRoundedOnce) {
  const std::vector<int32_t> tokens{6, 0, 3, 3, 5, 3, 3, 1};
  const Tensor chosen = Tensor::of(std::span(tokens), {8});
  Matrix dout(DType::bf16, 8, 33), table(DType::bf16, 7, 33), in_f32(DType::f32, 7, 33),
      expected(DType::bf16, 7, 33);
  dout.fill("dout"), table.fill("table");
  cast(Exec{}, table.tensor, in_f32.tensor);
  embedding_backward(Exec{}, chosen, dout.tensor, 0, table.tensor);
  embedding_backward(Exec{}, chosen, dout.tensor, 0, in_f32.tensor);
  cast(Exec{}, in_f32.tensor, expected.tensor);
  EXPECT_EQ(table.values(), expected.values());
}

TEST(Optimizer, TakesGradientsInBf16) {
  constexpr int64_t kCount = 1003;
  Matrix gradient(DType::bf16, 1, kCount), in_f32(DType::f32, 1, kCount);
  gradient.fill("gradient");
  cast(Exec{}, gradient.tensor, in_f32.tensor);
  EXPECT_EQ(sum_of_squares(gradient.tensor), sum_of_squares(in_f32.tensor));
  std::vector<Doubles> results;
  for (const Matrix* each : {&gradient, &in_f32}) {
    Matrix w(DType::f32, 1, kCount), m(DType::f32, 1, kCount), v(DType::f32, 1, kCount);
    w.fill("w"), m.fill("m");
    adamw(Exec{}, {.lr = 0.1f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f}, true,
          {w.tensor, m.tensor, v.tensor}, each->tensor);
    for (const Matrix* result : {&w, &m, &v}) results.push_back(result->values());
  }
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(results[i], results[i + 3]);
}

TEST(Elementwise, RefusesOtherTypes) {
  Matrix x(DType::f32, 2, 2), y(DType::f16, 2, 2);
  EXPECT_THROW(cast(Exec{}, x.tensor, y.tensor), InvalidArgument);
}

TEST_P(Elementwise, ShardedEmbeddingSumsToTheWhole) {
  const int64_t vocab = 7, hidden = 5;
  const std::vector<int32_t> tokens{6, 0, 3, 3, 5, 0, 2, 1};
  Matrix table(GetParam(), vocab, hidden), dout(GetParam(), 8, hidden);
  table.fill("table"), dout.fill("dout");
  Matrix dtable(DType::f32, vocab, hidden);
  std::vector<double> sum(8 * size_t(hidden));
  for (const auto& [begin, count] : {std::pair{0, 4}, {4, 3}}) {
    Matrix out(GetParam(), 8, hidden);
    out.fill("garbage");
    embedding_forward(Exec{}, Tensor::of(std::span(tokens), {8}), table.tensor.rows(begin, count),
                      begin, out.tensor);
    const auto values = out.values();
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += values[i];
    embedding_backward(Exec{}, Tensor::of(std::span(tokens), {8}), dout.tensor, begin,
                       dtable.tensor.rows(begin, count));
  }
  Matrix expected(DType::f32, vocab, hidden);
  for (size_t i = 0; i < tokens.size(); ++i) {
    for (int64_t c = 0; c < hidden; ++c) {
      EXPECT_EQ(sum[i * size_t(hidden) + size_t(c)], table.get(tokens[i], c));
      expected.set(tokens[i], c, expected.get(tokens[i], c) + dout.get(int64_t(i), c));
    }
  }
  EXPECT_LE(relative_error(dtable.values(), expected.values()), 1e-6);
}

}  // namespace
}  // namespace tandem
