#include "gemm/coded_weight.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <span>
#include <string>
#include <vector>

#include "gemm/gemm.h"
#include "tandem/error.h"
#include "tests/kernels/reference.h"

namespace tandem {
namespace {
using namespace tandem::test;

constexpr WeightFormat kFormats[] = {WeightFormat::int8, WeightFormat::e4m3};

/// Smallest bf16 value that is at least `value`, by trial.
double next_bf16(double value) {
  BFloat16 nearest = BFloat16::from_float(float(value));
  while (double(nearest.to_float()) < value) {
    ++nearest.bits;
  }
  return nearest.to_float();
}

/// Nearest number of e4m3, ties to the even one, by its steps.
double nearest_e4m3(double value) {
  const double magnitude = std::fabs(value);
  const int exponent = std::max(-6, magnitude > 0 ? std::ilogb(magnitude) : -6);
  const double step = std::ldexp(1.0, exponent - 3);
  return std::copysign(std::min(std::nearbyint(magnitude / step) * step, 448.0), value);
}

/// Scale of a group, and the number that a weight is a multiple of it by.
struct Coding {
  double scale;
  double (*number)(float weight, float scale);
};

Coding coding_of(WeightFormat format, double max) {
  if (format == WeightFormat::int8) {
    return {next_bf16(float(max) / 127.0f), [](float weight, float scale) {
              return scale == 0 ? 0.0 : double(std::round(weight / scale));
            }};
  }
  return {std::max(float(max) / 448.0f, FLT_MIN),
          [](float weight, float scale) { return nearest_e4m3(weight / scale); }};
}

/// The weights as they are quantized.
Doubles quantized(WeightFormat format, const Matrix& weight) {
  Doubles all = weight.values();
  const int64_t columns = weight.tensor.dim(1), size = group_of(format);
  for (int64_t row = 0; row < weight.tensor.dim(0); ++row) {
    for (int64_t first = 0; first < columns; first += size) {
      const std::span group = std::span(all).subspan(size_t(row * columns + first),
                                                     size_t(std::min(size, columns - first)));
      double max = 0;
      for (const double w : group) max = std::max(max, std::fabs(w));
      const auto [scale, number] = coding_of(format, max);
      for (double& w : group) w = float(number(float(w), float(scale)) * scale);
    }
  }
  return all;
}

CodedWeight coded(WeightFormat format, const Matrix& weight) {
  CodedWeight result({}, format, weight.tensor.dim(0), weight.tensor.dim(1));
  result.quantize({}, weight.tensor);
  return result;
}

/// Rows of an identity matrix give the weights, exactly.
Doubles stored(const CodedWeight& weight, int64_t rows, int64_t columns) {
  Matrix identity(DType::f32, columns, columns), out(DType::f32, columns, rows);
  for (int64_t i = 0; i < columns; ++i) identity.set(i, i, 1);
  weight.multiply({}, identity.tensor, out.tensor);
  Doubles all;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; ++column) all.push_back(out.get(column, row));
  }
  return all;
}

Matrix weight_of(int64_t rows, int64_t columns) {
  Matrix weight(DType::f32, rows, columns);
  weight.fill("weight", 0.02);
  for (int64_t i = 0; i < columns; ++i) {
    weight.set(0, i, 0);                                    // the smallest scale
    weight.set(rows - 1, i, i % 7 == 3 ? 5.0 : i * 1e-42);  // an outlier in each group
  }
  return weight;
}

class CodedWeights : public ::testing::TestWithParam<WeightFormat> {};
INSTANTIATE_TEST_SUITE_P(Formats, CodedWeights, ::testing::ValuesIn(kFormats),
                         [](const auto& format) { return std::string(name_of(format.param)); });

TEST_P(CodedWeights, HoldTheNearestMultipleOfAGroupsScale) {
  const WeightFormat format = GetParam();
  for (const int64_t columns : {1, 15, 63, 64, 65, 127, 128, 129, 192, 200}) {
    const Matrix weight = weight_of(9, columns);
    const CodedWeight codes = coded(format, weight);
    EXPECT_EQ(stored(codes, 9, columns), quantized(format, weight)) << columns;
    Matrix read(DType::f32, 9, columns);
    codes.read({}, read.tensor);
    EXPECT_EQ(read.values(), quantized(format, weight)) << columns;
  }
}

/// Bound of a weight's error in a group of this max, as coded_weight.h has it.
double error_bound(WeightFormat format, double weight, double max) {
  if (format == WeightFormat::int8) return coding_of(format, max).scale / 2;
  return std::max(std::fabs(weight) / 16, std::max(max / 448, double(FLT_MIN)) / 1024);
}

TEST_P(CodedWeights, AreWithinTheFormatsBoundAtAnyMagnitude) {
  const WeightFormat format = GetParam();
  const int64_t rows = 6, columns = 300, size = group_of(format);
  for (const double magnitude : {1e38, 1e4, 1.0, 1e-6, 1e-30, 1e-36}) {
    Matrix weight(DType::f32, rows, columns);
    weight.fill("weight", magnitude / 6);
    for (int64_t i = 0; i < columns; ++i) {
      weight.set(1, i, i % 3 == 0 ? 0.0 : std::ldexp(magnitude, -int(i % 40)));  // all exponents
      weight.set(2, i, i % 2 == 0 ? magnitude : -magnitude);
    }
    const Doubles found = stored(coded(format, weight), rows, columns);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = 0; column < columns; ++column) {
        const int64_t first = column / size * size;
        double max = 0;
        for (int64_t i = first; i < std::min(first + size, columns); ++i) {
          max = std::max(max, std::fabs(weight.get(row, i)));
        }
        const double w = weight.get(row, column), value = found[size_t(row * columns + column)];
        ASSERT_LE(std::fabs(value - w), error_bound(format, w, max) * (1 + 1e-5))
            << magnitude << ": " << row << ", " << column << " is " << w;
      }
    }
  }
}

TEST_P(CodedWeights, AreReplacedAsAWhole) {
  const WeightFormat format = GetParam();
  const Matrix first = weight_of(5, 200);
  Matrix second(DType::f32, 5, 200);
  second.fill("second", 3);
  CodedWeight codes = coded(format, first);
  codes.quantize({}, second.tensor);
  EXPECT_EQ(stored(codes, 5, 200), quantized(format, second));
  EXPECT_NEAR(double(codes.bytes()) / (5 * 256), bytes_per_weight(format), 1e-9);
}

TEST_P(CodedWeights, ShardsByRowsAndByGroupsHoldTheSameWeights) {
  const WeightFormat format = GetParam();
  const int64_t rows = 12, columns = 4 * group_of(format);
  const Matrix weight = weight_of(rows, columns);
  const Doubles whole = stored(coded(format, weight), rows, columns);
  for (const int64_t ranks : {2, 4}) {
    const int64_t n = rows / ranks, k = columns / ranks;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      Matrix by_rows(DType::f32, n, columns), by_columns(DType::f32, rows, k);
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < columns; ++j) {
          const double w = weight.get(i, j);
          if (i / n == rank) by_rows.set(i - rank * n, j, w);
          if (j / k == rank) by_columns.set(i, j - rank * k, w);
        }
      }
      const Doubles of_rows = stored(coded(format, by_rows), n, columns);
      const Doubles of_columns = stored(coded(format, by_columns), rows, k);
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < columns; ++j) {
          const double expected = whole[size_t(i * columns + j)];
          if (i / n == rank) {
            EXPECT_EQ(of_rows[size_t((i - rank * n) * columns + j)], expected);
          }
          if (j / k == rank) {
            EXPECT_EQ(of_columns[size_t(i * k + j - rank * k)], expected);
          }
        }
      }
    }
  }
}

TEST_P(CodedWeights, ProductsMatchReferenceAndRowsKeepTheirBits) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const int64_t n : {1, 3, 4, 6, 150}) {
      for (const int64_t k : {1, 17, 64, 200}) {
        const Matrix weight = weight_of(n, k);
        const CodedWeight codes = coded(GetParam(), weight);
        const Doubles w = quantized(GetParam(), weight);
        const int64_t max_rows = 14;  // more than from which weights are decoded once
        Matrix x(dtype, max_rows, k, k + 3), all(dtype, max_rows, n, n + 5);
        x.fill("x");
        codes.multiply({}, x.tensor, all.tensor);
        Doubles expected;
        for (int64_t i = 0; i < max_rows; ++i) {
          for (int64_t j = 0; j < n; ++j) {
            double sum = 0;
            for (int64_t p = 0; p < k; ++p) sum += x.get(i, p) * w[size_t(j * k + p)];
            expected.push_back(sum);
          }
        }
        EXPECT_LE(relative_error(all.values(), expected), dtype == DType::f32 ? 1e-6 : 4e-3)
            << n << " x " << k;
        for (int64_t rows = 1; rows < max_rows; ++rows) {
          for (const int threads : {1, 2}) {
            set_kernel_threads(threads);
            Matrix some(dtype, rows, n);
            codes.multiply({}, x.tensor.rows(max_rows - rows, rows), some.tensor);
            const Doubles tail = all.values(), got = some.values();
            EXPECT_TRUE(std::equal(got.begin(), got.end(), tail.end() - int64_t(got.size())))
                << rows << " rows of " << n << " x " << k;
          }
        }
        set_kernel_threads(1);
      }
    }
  }
}

TEST_P(CodedWeights, RowsOfAWeightGiveTheirColumnsOfTheProduct) {
  const CodedWeight weight = coded(GetParam(), weight_of(23, 130));
  for (const int64_t rows : {1, 14}) {
    Matrix x(DType::f32, rows, 130), all(DType::f32, rows, 23), some(DType::f32, rows, 9);
    x.fill("x");
    weight.multiply({}, x.tensor, all.tensor);
    weight.multiply({}, x.tensor, some.tensor, {.first_row = 5});
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < 9; ++j) EXPECT_EQ(some.get(i, j), all.get(i, j + 5));
    }
  }
}

TEST_P(CodedWeights, ProductsAreAddedWithOneRounding) {
  const CodedWeight weight = coded(GetParam(), weight_of(7, 96));
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const int64_t rows : {2, 14}) {
      Matrix x(DType::f32, rows, 96), product(DType::f32, rows, 7), sum(dtype, rows, 7, 9);
      x.fill("x");
      sum.fill("sum");
      const Doubles before = sum.values();
      weight.multiply({}, x.tensor, product.tensor);
      weight.multiply({}, x.tensor, sum.tensor, {.accumulate = true});
      const Doubles products = product.values(), found = sum.values();
      for (size_t i = 0; i < found.size(); ++i) {
        const float expected = float(before[i]) + float(products[i]);
        EXPECT_EQ(found[i],
                  dtype == DType::f32 ? expected : BFloat16::from_float(expected).to_float());
      }
    }
  }
}

TEST_P(CodedWeights, OtherShapesAreRefused) {
  const CodedWeight weight = coded(GetParam(), weight_of(5, 70));
  const Matrix x(DType::f32, 2, 70), narrow(DType::f32, 2, 64), out(DType::f32, 2, 5);
  EXPECT_THROW(weight.multiply({}, narrow.tensor, out.tensor), InvalidArgument);
  EXPECT_THROW(weight.multiply({}, x.tensor, narrow.tensor), InvalidArgument);
  EXPECT_THROW(weight.multiply({}, x.tensor, out.tensor, {.first_row = 1}), InvalidArgument);
  EXPECT_NO_THROW(weight.multiply({}, x.tensor, out.tensor));
  EXPECT_FALSE(weight.multiply_swiglu({}, x.tensor, out.tensor)) << "GPUs only";
  EXPECT_THROW(weight.read({}, narrow.tensor), InvalidArgument);
  CodedWeight other({}, GetParam(), 2, 64);
  EXPECT_THROW(other.quantize({}, x.tensor), InvalidArgument);
  EXPECT_NO_THROW(other.quantize({}, narrow.tensor));
}

TEST(WeightFormats, AreParsedByName) {
  EXPECT_FALSE(parse_weight_format("none"));
  for (const std::string& name : weight_format_names()) {
    const auto format = parse_weight_format(name);
    EXPECT_EQ(format ? name_of(*format) : "none", name);
  }
  EXPECT_THROW(parse_weight_format("int4"), InvalidArgument);
  EXPECT_THROW(parse_weight_format(""), InvalidArgument);
}

}  // namespace
}  // namespace tandem
