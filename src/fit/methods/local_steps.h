// Local gradient steps with control variates and sparse exchanges, of which Scaffnew (ProxSkip,
// Mishchenko et al., ICML 2022), CompressedScaffnew (arXiv 2210.13277) and TAMUNA (arXiv
// 2302.09832) are cases. A round, for a cohort of c of the n clients and a sparsity s:
//   x_i = xbar;  L times, L geometric with mean 1 / p:  x_i -= step (gradient_i(x_i) - h_i)
//   xbar = (1 / s) sum_i q_i x_i                      q_i: 0/1 mask, each coordinate of s clients
//   h_i += (eta / step) q_i (xbar - x_i)              eta = p c (s - 1) / (s (c - 1))
// so that sum h_i stays 0. Clients outside the cohort keep their h_i. Only masked coordinates are
// sent up; xbar is sent down to all clients if all take part, else whole to the cohort at the
// begin and its masked coordinates at the end.
#pragma once

#include <memory>

#include "fit/methods/method.h"

namespace tandem::fit {

struct LocalStepsParams {
  int cohort = 0, sparsity = 0;
  double p = 1;
  /// --control: h_i is updated on all coordinates (`all_coordinates`), or xbar is the mean over a
  /// random cohort of a method in which all clients take part (`partial_mean`).
  bool all_coordinates = false, partial_mean = false;
};

/// Throws InvalidArgument unless 2 <= sparsity <= cohort <= clients and 0 < --p <= 1.
void check_local_steps(const FitOptions& options, int cohort, int sparsity);

std::unique_ptr<Method> make_local_steps(const Setup& setup, const LocalStepsParams& params);

/// --p, or sqrt(clients / (sparsity * kappa)), at most 1, with which communication is least.
double choose_p(const Setup& setup, int sparsity);

}  // namespace tandem::fit
