// Minimizers on one rank: the exact answer of a problem, and the subproblems that clients solve.
#pragma once

#include <span>

#include "fit/problem/objective.h"

namespace tandem::fit {

/// F(x) = f(x) + linear . x + attraction / 2 |x - center|^2 + l1 |x|_1. Empty `linear` and `center`
/// are zeros.
struct Subproblem {
  const Objective& f;
  std::span<const double> linear = {};
  double attraction = 0;
  std::span<const double> center = {};
  double l1 = 0;

  double value(std::span<const double> x) const;
  /// Gradient without the term of l1.
  void gradient(std::span<const double> x, std::span<double> out) const;
};

/// Tolerance of clients' subproblems with L1, which may be flat in some directions.
constexpr double kFlatTolerance = 1e-6;

/// Minimizes F from `x` on until two steps in turn do not halve its shortest subgradient and that
/// is at most `tolerance` times 1 + the first. Conjugate gradients on Newton's system if l1 = 0,
/// else coordinate descent on the quadratic models of proximal Newton steps (Lee, Sun, Saunders,
/// 2014). Returns whether it has converged within 200 steps: not if F is not bounded from below.
bool minimize(const Subproblem& problem, std::span<double> x, double tolerance = 1e-11);

}  // namespace tandem::fit
