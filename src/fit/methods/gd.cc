// Gradient descent, proximal for L1: the baseline that exchanges every gradient.
#include <algorithm>

#include "fit/exchange/star.h"
#include "fit/methods/rows.h"
#include "fit/problem/vectors.h"

namespace tandem::fit {
namespace {

/// 2 / (L + l2) is fastest, but at l2 = 0 steps along the largest eigenvector no longer shrink.
double default_step(const Problem& problem) {
  const double step = 2 / (problem.smoothness() + problem.l2());
  return problem.l1() > 0 ? std::min(step, 1.8 / problem.smoothness()) : step;
}

class GradientDescent final : public Method {
 public:
  explicit GradientDescent(const Setup& setup)
      : Method(setup.problem.optimum()),
        setup_(setup),
        step_(setup.options.step.value_or(1) * default_step(setup.problem)),
        x_(setup.problem.features(), 0.0) {}

  FloatCount run_round(int64_t) override {
    Vector mean(x_.size(), 0.0);
    collect_gradients(setup_, x_, mean);
    if (setup_.channel.has_server()) {
      for (size_t k = 0; k < x_.size(); ++k)
        x_[k] = soft_threshold(x_[k] - step_ * mean[k], step_ * setup_.problem.l1());
    }
    return {int64_t(x_.size()), int64_t(x_.size())};
  }

  std::vector<std::span<const double>> answers() const override {
    if (!setup_.channel.has_server()) return {};
    return {x_};
  }

  std::vector<Setting> settings() const override { return {{"step", step_}}; }

 private:
  const Setup setup_;
  const double step_;
  Vector x_;  // of the server
};

}  // namespace

const MethodRow& gd_row() {
  static const MethodRow row{"gd",
                             "gradient descent: every gradient is exchanged",
                             {&kStepOption},
                             true,
                             nullptr,
                             nullptr,
                             [](const Setup& setup) -> std::unique_ptr<Method> {
                               return std::make_unique<GradientDescent>(setup);
                             }};
  return row;
}

}  // namespace tandem::fit
