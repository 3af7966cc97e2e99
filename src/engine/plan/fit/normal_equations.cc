#include "engine/plan/fit/normal_equations.h"

#include <cmath>

namespace tandem::plan {

bool factorize(SymmetricMatrix& matrix) {
  for (size_t j = 0; j < matrix.n; ++j) {
    for (size_t i = j; i < matrix.n; ++i) {
      double sum = matrix.at(i, j);
      for (size_t k = 0; k < j; ++k) sum -= matrix.at(i, k) * matrix.at(j, k);
      if (i == j && !(sum > 0)) return false;
      matrix.at(i, j) = i == j ? std::sqrt(sum) : sum / matrix.at(j, j);
    }
  }
  return true;
}

std::vector<double> solve(const SymmetricMatrix& factor, std::vector<double> b) {
  for (size_t i = 0; i < factor.n; ++i) {
    for (size_t k = 0; k < i; ++k) b[i] -= factor.at(i, k) * b[k];
    b[i] /= factor.at(i, i);
  }
  for (size_t i = factor.n; i-- > 0;) {
    for (size_t k = i + 1; k < factor.n; ++k) b[i] -= factor.at(k, i) * b[k];
    b[i] /= factor.at(i, i);
  }
  return b;
}

}  // namespace tandem::plan
