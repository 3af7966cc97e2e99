// Inputs that every rank can generate for every other rank, and GEMMs of them in double.
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
  /// `transposed`: memory is [columns, rows]. `padding`: unused elements after each stored row.
  Matrix(DType dtype, int64_t rows, int64_t columns, uint64_t seed, bool transposed = false,
         int64_t padding = 0);
  const Tensor& tensor() const { return tensor_; }
  double at(int64_t row, int64_t column) const;
  /// Vector [columns], for a matrix of one row.
  Tensor vector() const;

 private:
  Memory memory_;
  Tensor tensor_;
};

double at(const Tensor& tensor, int64_t row, int64_t column);

/// Rows of `x` after each is sent as a separate message; `x` itself on one rank, where nothing is
/// sent.
Matrix as_sent(const Communicator& comm, const Wire& wire, const Tensor& x);

/// A row times a column in double, summed over ranks, and the terms of its error bound.
struct Expected {
  double value = 0, magnitude = 0;  ///< magnitude: sum of the terms' magnitudes
  ErrorBound rounding;              ///< of the partial sums added so far

  void add(double term) { value += term, magnitude += std::abs(term); }
  /// Adds a rank's partial sum of `terms` terms, accumulated in f32 and then rounded to `wire`.
  void add_partial(const Expected& partial, int64_t terms, DType wire);
  /// Max difference of `out` from `value`, for `terms` terms and running sums rounded to `wire`
  /// `running_roundings` times.
  double bound(int64_t terms, DType wire, int running_roundings, DType out) const;
};

/// Every byte of every row, in order.
std::vector<std::byte> bytes_of(const Tensor& tensor);

}  // namespace tandem::test
