// Inputs that every rank can generate for every other rank, and products of them in double.
#pragma once

#include <cstdint>
#include <vector>

#include "tandem/collectives.h"
#include "tandem/communicator.h"
#include "tandem/tensor.h"

namespace tandem::test {

/// A [rows, columns] matrix of random values, a pure function of (seed, row, column).
class Matrix {
 public:
  /// `transposed`: memory is [columns, rows]. `padding`: unused elements after each line.
  Matrix(DType dtype, int64_t rows, int64_t columns, uint64_t seed, bool transposed = false,
         int64_t padding = 0);
  const Tensor& tensor() const { return tensor_; }
  double at(int64_t row, int64_t column) const;
  /// As a vector [columns], for a matrix of one row.
  Tensor vector() const;

 private:
  Buffer memory_;
  Tensor tensor_;
};

double at(const Tensor& tensor, int64_t row, int64_t column);

/// sum and sum of magnitudes of a row times a column, in double: what error bounds scale with.
struct Expected {
  double value = 0, magnitude = 0;
};

/// Every byte of every row, in order.
std::vector<std::byte> bytes_of(const Tensor& tensor);

}  // namespace tandem::test
