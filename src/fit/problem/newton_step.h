// Newton's system by conjugate gradients.
#pragma once

#include <functional>
#include <span>

#include "fit/problem/objective.h"

namespace tandem::fit {

/// Solves A step = -gradient for a symmetric positive definite A, given by its product with a
/// vector, to a residual of `tolerance` |gradient|, or as far as 2,000 products lead.
Vector conjugate_gradients(std::span<const double> gradient, double tolerance,
                           const std::function<void(const Vector& v, Vector& out)>& product);

/// Solves (Hessian of f's data + ridge) step = -gradient. `curvature`: of f at the current point.
Vector newton_step(const Objective& f, std::span<const double> curvature, double ridge,
                   std::span<const double> gradient, double tolerance = 1e-6);

}  // namespace tandem::fit
