// Consensus by a penalty instead of a constraint: the point that API-BCD converges to.
#pragma once

#include "fit/problem/problem.h"

namespace tandem::fit {

/// The z that minimizes sum over clients of min_x f_i(x) + tau / 2 |x - z|^2, by Newton's method.
/// Throws Error if it has not converged.
Vector penalized_optimum(const Problem& problem, double tau);

}  // namespace tandem::fit
