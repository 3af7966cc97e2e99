// Small dense symmetric systems of least squares.
#pragma once

#include <cstddef>
#include <vector>

namespace tandem::plan {

/// Symmetric matrix of n x n, row by row.
struct SymmetricMatrix {
  size_t n = 0;
  std::vector<double> values;
  explicit SymmetricMatrix(size_t size) : n(size), values(size * size) {}
  double& at(size_t row, size_t column) { return values[row * n + column]; }
  double at(size_t row, size_t column) const { return values[row * n + column]; }
};

/// Lower Cholesky factor of a positive definite matrix, in place. False if it is not.
bool factorize(SymmetricMatrix& matrix);
/// Solution x of A x = b, by A's factor.
std::vector<double> solve(const SymmetricMatrix& factor, std::vector<double> b);

}  // namespace tandem::plan
