// Inputs that every rank can generate for every other rank, and products of them in double.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "bench/error_bound.h"
#include "tandem/codec.h"
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

/// What the ranks have of each row of `x` once it has travelled as a message of its own: the same
/// on one rank, where nothing travels.
Matrix as_sent(const Communicator& comm, const Wire& wire, const Tensor& x);

/// A row times a column in double, summed over ranks, and what bounds of its error are made of.
struct Expected {
  double value = 0, magnitude = 0;  ///< magnitude: sum of the terms' magnitudes
  ErrorBound rounding;              ///< of ranks' partial sums, so far as they were added

  void add(double term) { value += term, magnitude += std::abs(term); }
  /// A rank's part of the sum, of so many terms, accumulated in f32 and then rounded to `wire`.
  void add_partial(const Expected& part, int64_t terms, DType wire);
  /// What `out` may differ by from `value` that sums up these, of which running sums are rounded to
  /// `wire` so many times.
  double bound(int64_t terms, DType wire, int running_roundings, DType out) const;
};

/// Every byte of every row, in order.
std::vector<std::byte> bytes_of(const Tensor& tensor);

}  // namespace tandem::test
