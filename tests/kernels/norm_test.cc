#include "kernels/norm.h"

#include <gtest/gtest.h>

#include "kernels/elementwise.h"
#include "tests/kernels/reference.h"

namespace tandem {
namespace {
using namespace tandem::test;

constexpr double kEps = 1e-5;

Doubles reference(const Doubles& x, const Doubles& weight) {
  const size_t n = weight.size();
  Doubles out(x.size());
  for (size_t row = 0; row < x.size() / n; ++row) {
    double squares = 0;
    for (size_t i = 0; i < n; ++i) squares += x[row * n + i] * x[row * n + i];
    const double scale = 1 / std::sqrt(squares / double(n) + kEps);
    for (size_t i = 0; i < n; ++i) out[row * n + i] = x[row * n + i] * scale * weight[i];
  }
  return out;
}

class RmsNorm : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(DTypes, RmsNorm, ::testing::Values(DType::f32, DType::bf16),
                         [](const auto& test) { return std::string(name_of(test.param)); });

TEST_P(RmsNorm, MatchesReferenceAndDifferences) {
  for (const auto& [rows, hidden] : {std::pair{1, 1}, {3, 7}, {2, 48}, {0, 8}}) {
    Matrix x(DType::f32, rows, hidden), weight(DType::f32, 1, hidden);
    Matrix out(GetParam(), rows, hidden), dout(GetParam(), rows, hidden);
    Matrix dx(DType::f32, rows, hidden), dweight(DType::f32, 1, hidden);
    x.fill("x", 2), weight.fill("weight"), dout.fill("dout");
    dx.fill("start"), dweight.fill("start");
    const Doubles dx_start = dx.values(), dweight_start = dweight.values();
    Matrix inverse_rms(DType::f32, 1, rows);

    rms_norm_forward(Exec{}, x.tensor, weight.tensor, kEps, out.tensor, inverse_rms.tensor);
    EXPECT_LE(relative_error(out.values(), reference(x.values(), weight.values())),
              tolerance(GetParam()));

    Matrix rounded(DType::bf16, rows, hidden), expected(DType::bf16, rows, hidden);
    rms_norm_backward(Exec{}, x.tensor, weight.tensor, inverse_rms.tensor, dout.tensor, dx.tensor,
                      dweight.tensor, {}, rounded.tensor);
    cast(Exec{}, dx.tensor, expected.tensor);
    EXPECT_EQ(rounded.values(), expected.values());
    Matrix dx_bf16(DType::bf16, rows, hidden), sum(DType::f32, rows, hidden);
    dx_bf16.fill("start");
    cast(Exec{}, dx_bf16.tensor, sum.tensor);
    for (const Matrix* to : {&dx_bf16, &sum}) {
      dweight.fill("start");
      rms_norm_backward(Exec{}, x.tensor, weight.tensor, inverse_rms.tensor, dout.tensor,
                        to->tensor, dweight.tensor);
    }
    cast(Exec{}, sum.tensor, expected.tensor);
    EXPECT_EQ(dx_bf16.values(), expected.values()) << "rounded once";
    auto dx_numeric = numeric_gradient(x.values(), [&](const Doubles& v) {
      return dot(reference(v, weight.values()), dout.values());
    });
    auto dweight_numeric = numeric_gradient(weight.values(), [&](const Doubles& v) {
      return dot(reference(x.values(), v), dout.values());
    });
    for (size_t i = 0; i < dx_numeric.size(); ++i) dx_numeric[i] += dx_start[i];
    for (size_t i = 0; i < dweight_numeric.size(); ++i) dweight_numeric[i] += dweight_start[i];
    EXPECT_LE(relative_error(dx.values(), dx_numeric), 1e-5) << rows << " x " << hidden;
    EXPECT_LE(relative_error(dweight.values(), dweight_numeric), 1e-5);
  }
}

TEST_P(RmsNorm, AfterAnAddHasTheBitsOfTheTwoSteps) {
  constexpr int kRows = 3, kHidden = 48;
  Matrix x(DType::f32, kRows, kHidden), weight(DType::f32, 1, kHidden);
  Matrix branch(GetParam(), kRows, kHidden);
  x.fill("x"), weight.fill("weight"), branch.fill("branch");
  Matrix y(DType::f32, kRows, kHidden), inverse_rms(DType::f32, 1, kRows);
  Matrix out(GetParam(), kRows, kHidden), expected(GetParam(), kRows, kHidden);

  add_rms_norm_forward(Exec{}, x.tensor, branch.tensor, weight.tensor, kEps, y.tensor, out.tensor,
                       inverse_rms.tensor);
  const Doubles sum = y.values();
  add(Exec{}, x.tensor, branch.tensor, y.tensor);
  EXPECT_EQ(sum, y.values());
  const Doubles scales = inverse_rms.values();
  rms_norm_forward(Exec{}, y.tensor, weight.tensor, kEps, expected.tensor, inverse_rms.tensor);
  EXPECT_EQ(out.values(), expected.values());
  EXPECT_EQ(scales, inverse_rms.values());
}

}  // namespace
}  // namespace tandem
