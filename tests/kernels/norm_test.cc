#include "kernels/norm.h"

#include <gtest/gtest.h>

#include <array>
#include <tuple>
#include <vector>

#include "kernels/divided_norm.h"
#include "kernels/elementwise.h"
#include "kernels/row_ops.h"
#include "tests/kernels/reference.h"

namespace tandem {
namespace {
using namespace tandem::test;

constexpr double kEps = 1e-5;

Doubles reference(const Doubles& x, const Doubles& weight, double offset = 0) {
  const size_t n = weight.size();
  Doubles out(x.size());
  for (size_t row = 0; row < x.size() / n; ++row) {
    double squares = 0;
    for (size_t i = 0; i < n; ++i) squares += x[row * n + i] * x[row * n + i];
    const double scale = 1 / std::sqrt(squares / double(n) + kEps);
    for (size_t i = 0; i < n; ++i) {
      out[row * n + i] = x[row * n + i] * scale * (offset + weight[i]);
    }
  }
  return out;
}

class RmsNorm : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(DTypes, RmsNorm, ::testing::Values(DType::f32, DType::bf16),
                         [](const auto& test) { return std::string(name_of(test.param)); });

TEST_P(RmsNorm, MatchesReferenceAndDifferences) {
  for (const auto& [rows, hidden, offset] :
       {std::tuple{1, 1, 0}, {3, 7, 1}, {2, 48, 0}, {2, 48, 1}, {0, 8, 0}}) {
    Matrix x(DType::f32, rows, hidden), weight(DType::f32, 1, hidden);
    Matrix out(GetParam(), rows, hidden), dout(GetParam(), rows, hidden);
    Matrix dx(DType::f32, rows, hidden), dweight(DType::f32, 1, hidden);
    x.fill("x", 2), weight.fill("weight"), dout.fill("dout");
    dx.fill("start"), dweight.fill("start");
    const Doubles dx_start = dx.values(), dweight_start = dweight.values();
    Matrix inverse_rms(DType::f32, 1, rows);
    const NormWeight norm(weight.tensor, float(offset));

    rms_norm_forward(Exec{}, x.tensor, norm, kEps, out.tensor, inverse_rms.tensor);
    EXPECT_LE(relative_error(out.values(), reference(x.values(), weight.values(), offset)),
              tolerance(GetParam()));

    Matrix rounded(DType::bf16, rows, hidden), expected(DType::bf16, rows, hidden);
    rms_norm_backward(Exec{}, x.tensor, norm, inverse_rms.tensor, dout.tensor, dx.tensor,
                      dweight.tensor, {}, rounded.tensor);
    cast(Exec{}, dx.tensor, expected.tensor);
    EXPECT_EQ(rounded.values(), expected.values());
    Matrix dx_bf16(DType::bf16, rows, hidden), sum(DType::f32, rows, hidden);
    dx_bf16.fill("start");
    cast(Exec{}, dx_bf16.tensor, sum.tensor);
    for (const Matrix* to : {&dx_bf16, &sum}) {
      dweight.fill("start");
      rms_norm_backward(Exec{}, x.tensor, norm, inverse_rms.tensor, dout.tensor, to->tensor,
                        dweight.tensor);
    }
    cast(Exec{}, sum.tensor, expected.tensor);
    EXPECT_EQ(dx_bf16.values(), expected.values()) << "rounded once";
    auto dx_numeric = numeric_gradient(x.values(), [&, offset = offset](const Doubles& v) {
      return dot(reference(v, weight.values(), offset), dout.values());
    });
    auto dweight_numeric =
        numeric_gradient(weight.values(), [&, offset = offset](const Doubles& v) {
          return dot(reference(x.values(), v, offset), dout.values());
        });
    for (size_t i = 0; i < dx_numeric.size(); ++i) dx_numeric[i] += dx_start[i];
    for (size_t i = 0; i < dweight_numeric.size(); ++i) dweight_numeric[i] += dweight_start[i];
    EXPECT_LE(relative_error(dx.values(), dx_numeric), 1e-5) << rows << " x " << hidden;
    EXPECT_LE(relative_error(dweight.values(), dweight_numeric), 1e-5);
  }
}

TEST_P(RmsNorm, WithoutAWeightIsRounding) {
  constexpr int kRows = 3, kHidden = 7;
  Matrix x(DType::f32, kRows, kHidden), branch(GetParam(), kRows, kHidden);
  Matrix y(DType::f32, kRows, kHidden), sum(DType::f32, kRows, kHidden);
  Matrix out(GetParam(), kRows, kHidden), expected(GetParam(), kRows, kHidden);
  x.fill("x"), branch.fill("branch");
  rms_norm_forward(Exec{}, x.tensor, {}, kEps, out.tensor, {});
  cast(Exec{}, x.tensor, expected.tensor);
  EXPECT_EQ(out.values(), expected.values());
  add_rms_norm_forward(Exec{}, x.tensor, branch.tensor, {}, kEps, y.tensor, out.tensor, {});
  add(Exec{}, x.tensor, branch.tensor, sum.tensor);
  cast(Exec{}, sum.tensor, expected.tensor);
  EXPECT_EQ(y.values(), sum.values());
  EXPECT_EQ(out.values(), expected.values());

  Matrix rounded(DType::bf16, kRows, kHidden), bf16(DType::bf16, kRows, kHidden);
  rms_norm_backward(Exec{}, x.tensor, {}, {}, branch.tensor, x.tensor, {}, {}, rounded.tensor);
  cast(Exec{}, sum.tensor, bf16.tensor);
  EXPECT_EQ(x.values(), sum.values());
  EXPECT_EQ(rounded.values(), bf16.values());
}

/// Columns [begin, begin + count) of a matrix of doubles.
Doubles slice(const Doubles& all, int64_t columns, int64_t begin, int64_t count) {
  Doubles found;
  for (size_t i = 0; i < all.size(); ++i) {
    const int64_t column = int64_t(i) % columns;
    if (column >= begin && column < begin + count) found.push_back(all[i]);
  }
  return found;
}

TEST_P(RmsNorm, OfDividedColumnsMatchesReferenceAndDifferences) {
  struct Rank {
    int64_t begin;
    Matrix rows, unnormalized, drows, weight, dweight, inverse_rms, products;
  };
  for (const auto& [rows, split, columns, offset] :
       {std::array{1, 1, 2, 0}, {3, 5, 16, 0}, {2, 48, 96, 1}}) {
    Matrix x(GetParam(), rows, columns), weight(DType::f32, 1, columns),
        dout(GetParam(), rows, columns);
    x.fill("x", 2), weight.fill("weight"), dout.fill("dout");
    std::vector<Rank> ranks;
    for (const auto& [begin, end] : {std::pair{0, split}, {split, columns}}) {
      const int64_t n = end - begin;
      ranks.push_back({begin, Matrix(GetParam(), rows, n, n + 3),
                       Matrix(GetParam(), rows, n, n + 1), Matrix(GetParam(), rows, n),
                       Matrix(DType::f32, 1, n), Matrix(DType::f32, 1, n),
                       Matrix(DType::f32, 1, rows), Matrix(DType::f32, 1, rows)});
      Rank& r = ranks.back();
      for (int64_t i = 0; i < n; ++i) {
        for (int64_t row = 0; row < rows; ++row) {
          r.rows.set(row, i, x.get(row, begin + i)), r.drows.set(row, i, dout.get(row, begin + i));
        }
        r.weight.set(0, i, weight.get(0, begin + i)), r.dweight.set(0, i, 1);
      }
    }
    const DividedNorm norm{columns, kEps};
    const auto vector = [](const Matrix& m) {
      return Tensor(m.tensor.data(), DType::f32, {m.tensor.dim(1)});
    };
    const auto norm_weight = [&, offset = offset](const Rank& r) {
      return NormWeight(vector(r.weight), float(offset));
    };
    const auto sum = [&](Matrix Rank::*sums) {
      add(Exec{}, (ranks[0].*sums).tensor, (ranks[1].*sums).tensor, (ranks[0].*sums).tensor);
      cast(Exec{}, (ranks[0].*sums).tensor, (ranks[1].*sums).tensor);
    };
    for (const Rank& r : ranks) divided_norm_squares(Exec{}, r.rows.tensor, vector(r.inverse_rms));
    sum(&Rank::inverse_rms);
    const Doubles expected = reference(x.values(), weight.values(), offset);
    for (const Rank& r : ranks) {
      divided_norm_forward(Exec{}, norm_weight(r), norm, r.rows.tensor, vector(r.inverse_rms),
                           r.unnormalized.tensor);
      const int64_t n = r.rows.tensor.dim(1);
      EXPECT_LE(relative_error(r.rows.values(), slice(expected, columns, r.begin, n)),
                tolerance(GetParam()));
      EXPECT_EQ(r.unnormalized.values(), slice(x.values(), columns, r.begin, n));
      divided_norm_products(Exec{}, norm_weight(r), r.unnormalized.tensor, r.drows.tensor,
                            vector(r.products));
    }
    sum(&Rank::products);
    const Doubles dx = numeric_gradient(x.values(), [&, offset = offset](const Doubles& v) {
      return dot(reference(v, weight.values(), offset), dout.values());
    });
    Doubles dweight = numeric_gradient(weight.values(), [&, offset = offset](const Doubles& v) {
      return dot(reference(x.values(), v, offset), dout.values());
    });
    for (double& each : dweight) each += 1;  // what was there
    for (const Rank& r : ranks) {
      divided_norm_backward(Exec{}, norm_weight(r), norm, r.unnormalized.tensor,
                            vector(r.inverse_rms), vector(r.products), r.drows.tensor,
                            vector(r.dweight));
      const int64_t n = r.rows.tensor.dim(1);
      EXPECT_LE(relative_error(r.drows.values(), slice(dx, columns, r.begin, n)),
                GetParam() == DType::f32 ? 2e-5 : tolerance(GetParam()));
      EXPECT_LE(relative_error(r.dweight.values(), slice(dweight, columns, r.begin, n)), 2e-5);
    }
  }
}

TEST_P(RmsNorm, OfHeadsMatchesReferenceAndDifferences) {
  constexpr int kRows = 3, kHeads = 2, kHeadDim = 9;
  for (const float offset : {0.0f, 1.0f}) {
    Matrix rows(GetParam(), kRows, kHeads * kHeadDim), drows(GetParam(), kRows, kHeads * kHeadDim);
    Matrix before(GetParam(), kRows, kHeads * kHeadDim);
    Matrix weight(DType::f32, 1, kHeadDim), dweight(DType::f32, 1, kHeadDim);
    rows.fill("x", 2), weight.fill("weight"), drows.fill("dout");
    const Doubles x = rows.values(), dout = drows.values();
    const NormWeight norm(weight.tensor, offset);
    rms_norm_heads(Exec{}, norm, kEps, rows.tensor, before.tensor);
    EXPECT_LE(relative_error(rows.values(), reference(x, weight.values(), offset)),
              tolerance(GetParam()));
    EXPECT_EQ(before.values(), x);
    for (int i = 0; i < kHeadDim; ++i) dweight.set(0, i, 0);
    rms_norm_heads_backward(Exec{}, before.tensor, norm, kEps, drows.tensor, dweight.tensor);
    const Doubles dx = numeric_gradient(
        x, [&](const Doubles& v) { return dot(reference(v, weight.values(), offset), dout); });
    const Doubles dw = numeric_gradient(
        weight.values(), [&](const Doubles& v) { return dot(reference(x, v, offset), dout); });
    EXPECT_LE(relative_error(drows.values(), dx),
              GetParam() == DType::f32 ? 2e-5 : tolerance(GetParam()));
    EXPECT_LE(relative_error(dweight.values(), dw), 2e-5);
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
