#include "fit/problem/newton_step.h"

#include "fit/problem/vectors.h"

namespace tandem::fit {

Vector conjugate_gradients(std::span<const double> gradient, double tolerance,
                           const std::function<void(const Vector& v, Vector& out)>& product) {
  constexpr int kMaxProducts = 2000;
  Vector step(gradient.size(), 0.0), residual(gradient.size()), image(gradient.size());
  for (size_t i = 0; i < residual.size(); ++i) residual[i] = -gradient[i];
  Vector direction = residual;
  double size = dot(residual, residual);
  const double enough = tolerance * tolerance * size;
  for (int i = 0; i < kMaxProducts && size > enough; ++i) {
    product(direction, image);
    const double curvature = dot(direction, image);
    if (!(curvature > 0)) break;  // rounding
    const double length = size / curvature;
    add_scaled(step, length, direction);
    add_scaled(residual, -length, image);
    const double next = dot(residual, residual);
    for (size_t k = 0; k < direction.size(); ++k)
      direction[k] = residual[k] + next / size * direction[k];
    size = next;
  }
  return step;
}

Vector newton_step(const Objective& f, std::span<const double> curvature, double ridge,
                   std::span<const double> gradient, double tolerance) {
  return conjugate_gradients(gradient, tolerance, [&](const Vector& v, Vector& out) {
    f.hessian_product(curvature, v, out, true);
    add_scaled(out, ridge, v);
  });
}

}  // namespace tandem::fit
