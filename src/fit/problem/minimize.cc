#include "fit/problem/minimize.h"

#include <algorithm>
#include <cmath>

#include "fit/problem/coordinate_descent.h"
#include "fit/problem/newton_step.h"
#include "fit/problem/vectors.h"

namespace tandem::fit {
namespace {

constexpr int kMaxSteps = 200;

/// Size of the shortest subgradient of F: 0 at the minimum.
double stationarity(const Subproblem& problem, std::span<const double> x,
                    std::span<const double> gradient) {
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double g = x[i] > 0   ? gradient[i] + problem.l1
                     : x[i] < 0 ? gradient[i] - problem.l1
                                : soft_threshold(gradient[i], problem.l1);
    sum += g * g;
  }
  return std::sqrt(sum);
}

/// Moves x along `step`, halved until F falls by a share of the decrease that its model predicts.
/// Near the minimum, where F changes by less than its rounding, the whole step is taken.
void line_search(const Subproblem& problem, std::span<double> x, std::span<const double> gradient,
                 std::span<const double> step) {
  constexpr double kShare = 1e-4, kRounding = 1e-13;
  const double before = problem.value(x);
  Vector trial(x.begin(), x.end());
  add_scaled(trial, 1, step);
  const double predicted = dot(gradient, step) + problem.l1 * (l1_norm(trial) - l1_norm(x));
  for (double length = 1; length > 1e-12; length /= 2) {
    std::copy(x.begin(), x.end(), trial.begin());
    add_scaled(trial, length, step);
    if (problem.value(trial) <=
        before + kShare * length * predicted + kRounding * (1 + std::abs(before)))
      break;
  }
  std::copy(trial.begin(), trial.end(), x.begin());
}

}  // namespace

double Subproblem::value(std::span<const double> x) const {
  double value = f.value(x) + l1 * l1_norm(x);
  if (!linear.empty()) value += dot(linear, x);
  for (size_t i = 0; attraction > 0 && i < x.size(); ++i) {
    const double apart = x[i] - (center.empty() ? 0 : center[i]);
    value += 0.5 * attraction * apart * apart;
  }
  return value;
}

void Subproblem::gradient(std::span<const double> x, std::span<double> out) const {
  f.gradient(x, out);
  for (size_t i = 0; i < x.size(); ++i) {
    if (!linear.empty()) out[i] += linear[i];
    out[i] += attraction * (x[i] - (center.empty() ? 0 : center[i]));
  }
}

bool minimize(const Subproblem& problem, std::span<double> x, double tolerance) {
  const double ridge = problem.f.l2() + problem.attraction;
  Vector gradient(x.size()), best(x.begin(), x.end());
  double first = 0, smallest = 0;
  int without_progress = 0;
  for (int step = 0; step < kMaxSteps; ++step) {
    problem.gradient(x, gradient);
    const double size = stationarity(problem, x, gradient);
    if (step == 0) first = smallest = size;
    if (step == 0 || size < smallest) {
      without_progress = size < 0.5 * smallest || step == 0 ? 0 : without_progress + 1;
      smallest = size;
      std::copy(x.begin(), x.end(), best.begin());
    } else {
      ++without_progress;
    }
    if (size == 0 || (without_progress >= 2 && smallest <= tolerance * (1 + first))) {
      std::copy(best.begin(), best.end(), x.begin());
      return true;
    }
    const Vector curvature = problem.f.curvature(x);
    const Vector direction =
        problem.l1 > 0 ? coordinate_descent(problem.f, curvature, ridge, gradient, problem.l1, x)
                       : newton_step(problem.f, curvature, ridge, gradient);
    line_search(problem, x, gradient, direction);
  }
  return false;
}

}  // namespace tandem::fit
