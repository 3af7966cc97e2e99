#include "fit/problem/penalized.h"

#include <fmt/format.h>

#include "fit/problem/minimize.h"
#include "fit/problem/newton_step.h"
#include "fit/problem/vectors.h"
#include "tandem/error.h"

namespace tandem::fit {
namespace {

/// The mean of the clients' Moreau envelopes, whose minimum is asked for. With x_i the client's
/// answer near z, its gradient is the mean of the f_i' at x_i, its Hessian that of
/// tau H_i (H_i + tau)^-1.
class Envelope {
 public:
  Envelope(const Problem& problem, double tau)
      : tau_(tau), answers_(size_t(problem.clients()), problem.optimum()) {
    for (int c = 0; c < problem.clients(); ++c) clients_.push_back(problem.client(c));
  }

  Vector gradient(const Vector& z) {
    Vector mean(z.size(), 0.0), gradient(z.size());
    for (size_t c = 0; c < clients_.size(); ++c) {
      minimize({.f = clients_[c], .attraction = tau_, .center = z}, answers_[c]);
      clients_[c].gradient(answers_[c], gradient);
      add_scaled(mean, 1 / double(clients_.size()), gradient);
    }
    return mean;
  }

  /// Newton's step at the point of the last gradient, by conjugate gradients.
  Vector step(const Vector& gradient) const {
    std::vector<Vector> curvatures;
    for (size_t c = 0; c < clients_.size(); ++c)
      curvatures.push_back(clients_[c].curvature(answers_[c]));
    return conjugate_gradients(gradient, 1e-6, [&](const Vector& v, Vector& out) {
      out.assign(v.size(), 0.0);
      Vector product(v.size());
      for (size_t c = 0; c < clients_.size(); ++c) {
        const Vector u = newton_step(clients_[c], curvatures[c], tau_ + clients_[c].l2(), v, 1e-13);
        clients_[c].hessian_product(curvatures[c], u, product);
        add_scaled(out, -tau_ / double(clients_.size()), product);
      }
    });
  }

 private:
  const double tau_;
  std::vector<Objective> clients_;
  std::vector<Vector> answers_;  // also where the next minimization begins
};

}  // namespace

Vector penalized_optimum(const Problem& problem, double tau) {
  constexpr int kMaxSteps = 60;
  constexpr double kConverged = 1e-12;
  Envelope envelope(problem, tau);
  Vector z = problem.optimum(), gradient = envelope.gradient(z);
  const double scale = 1 + norm(z) * tau;
  int steps = 0;
  for (; steps < kMaxSteps; ++steps) {
    const Vector step = envelope.step(gradient);
    double length = 1;
    Vector next = z, next_gradient;
    for (; length > 1e-6; length /= 2) {
      next = z;
      add_scaled(next, length, step);
      next_gradient = envelope.gradient(next);
      if (norm(next_gradient) < norm(gradient)) break;
    }
    if (length <= 1e-6) break;  // no shorter gradient is found: rounding ends progress
    z = std::move(next);
    gradient = std::move(next_gradient);
  }
  if (norm(gradient) > kConverged * scale) {
    throw Error(
        fmt::format("api-bcd: the penalized problem's gradient is {:.3g} after {} steps: "
                    "expected {:.3g}; a smaller --tau is better conditioned",
                    norm(gradient), steps, kConverged * scale));
  }
  return z;
}

}  // namespace tandem::fit
