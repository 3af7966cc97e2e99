#include "gemm/int8_weight.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <span>

#include "gemm/gemm.h"
#include "tandem/error.h"
#include "tests/kernels/reference.h"

namespace tandem {
namespace {
using namespace tandem::test;

/// Smallest bf16 value that is at least `value`, by trial.
double next_bf16(double value) {
  BFloat16 nearest = BFloat16::from_float(float(value));
  while (double(nearest.to_float()) < value) {
    ++nearest.bits;
  }
  return nearest.to_float();
}

/// The weights as they are quantized, in double precision.
Doubles quantized(const Matrix& weight) {
  Doubles all = weight.values();
  const int64_t columns = weight.tensor.dim(1);
  for (int64_t row = 0; row < weight.tensor.dim(0); ++row) {
    for (int64_t first = 0; first < columns; first += kInt8Group) {
      const std::span group = std::span(all).subspan(size_t(row * columns + first),
                                                     size_t(std::min(kInt8Group, columns - first)));
      double max = 0;
      for (const double w : group) max = std::max(max, std::fabs(w));
      const double scale = next_bf16(float(max) / 127.0f);
      for (double& w : group) w = scale == 0 ? 0 : std::round(w / scale) * scale;
    }
  }
  return all;
}

/// Rows of an identity matrix give the weights, exactly.
Doubles stored(const Int8Weight& weight, int64_t rows, int64_t columns) {
  Matrix identity(DType::f32, columns, columns), out(DType::f32, columns, rows);
  for (int64_t i = 0; i < columns; ++i) identity.set(i, i, 1);
  weight.multiply(identity.tensor, out.tensor);
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
    weight.set(0, i, 0);                                    // a scale of 0
    weight.set(rows - 1, i, i % 7 == 3 ? 5.0 : i * 1e-42);  // an outlier in each group
  }
  return weight;
}

TEST(Int8Weight, HoldsTheNearestMultipleOfAGroupsScale) {
  for (const int64_t columns : {1, 15, 63, 64, 65, 192, 200}) {
    const Matrix weight = weight_of(9, columns);
    const Int8Weight int8(weight.tensor);
    EXPECT_EQ(stored(int8, 9, columns), quantized(weight)) << columns;
    Matrix read(DType::f32, 9, columns);
    int8.read(read.tensor);
    EXPECT_EQ(read.values(), quantized(weight)) << columns;
  }
}

TEST(Int8Weight, ShardsByRowsAndByGroupsHoldTheSameWeights) {
  const int64_t rows = 12, columns = 4 * kInt8Group;
  const Matrix weight = weight_of(rows, columns);
  const Doubles whole = stored(Int8Weight(weight.tensor), rows, columns);
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
      const Doubles of_rows = stored(Int8Weight(by_rows.tensor), n, columns);
      const Doubles of_columns = stored(Int8Weight(by_columns.tensor), rows, k);
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

TEST(Int8Weight, ProductsMatchReferenceAndRowsKeepTheirBits) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const int64_t n : {1, 3, 4, 6, 150}) {
      for (const int64_t k : {1, 17, 64, 200}) {
        const Matrix weight = weight_of(n, k);
        const Int8Weight int8(weight.tensor);
        const Doubles w = quantized(weight);
        const int64_t max_rows = 14;  // more than from which weights are decoded once
        Matrix x(dtype, max_rows, k, k + 3), all(dtype, max_rows, n, n + 5);
        x.fill("x");
        int8.multiply(x.tensor, all.tensor);
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
            int8.multiply(x.tensor.rows(max_rows - rows, rows), some.tensor);
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

TEST(Int8Weight, RowsOfAWeightGiveTheirColumnsOfTheProduct) {
  const Int8Weight weight(weight_of(23, 130).tensor);
  for (const int64_t rows : {1, 14}) {
    Matrix x(DType::f32, rows, 130), all(DType::f32, rows, 23), some(DType::f32, rows, 9);
    x.fill("x");
    weight.multiply(x.tensor, all.tensor);
    weight.multiply(x.tensor, some.tensor, 5);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < 9; ++j) EXPECT_EQ(some.get(i, j), all.get(i, j + 5));
    }
  }
}

TEST(Int8Weight, OtherShapesAreRefused) {
  const Int8Weight weight(weight_of(5, 70).tensor);
  const Matrix x(DType::f32, 2, 70), narrow(DType::f32, 2, 64), out(DType::f32, 2, 5);
  EXPECT_THROW(weight.multiply(narrow.tensor, out.tensor), InvalidArgument);
  EXPECT_THROW(weight.multiply(x.tensor, narrow.tensor), InvalidArgument);
  EXPECT_THROW(weight.multiply(x.tensor, out.tensor, 1), InvalidArgument);
  EXPECT_NO_THROW(weight.multiply(x.tensor, out.tensor));
}

}  // namespace
}  // namespace tandem
