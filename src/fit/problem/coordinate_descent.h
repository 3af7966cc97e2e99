// Quadratic model with an L1 term by cyclic coordinate descent (Friedman, Hastie, Tibshirani,
// 2010).
#pragma once

#include <span>

#include "fit/problem/objective.h"

namespace tandem::fit {

/// Step s that minimizes gradient . s + s (Hessian of f's data + ridge) s / 2 + l1 |x + s|_1.
/// `curvature`: of f at x.
Vector coordinate_descent(const Objective& f, std::span<const double> curvature, double ridge,
                          std::span<const double> gradient, double l1, std::span<const double> x);

}  // namespace tandem::fit
