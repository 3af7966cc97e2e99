// Proximal communication-efficient surrogate likelihood (proxCSL, arXiv 2407.06346). From the mean
// of local answers on, an update:
//   G = mean gradient at w                                      of all clients
//   v = argmin f_0(v) + (G - g_0) . v + alpha / 2 |v - w|^2 + l1 |v|_1    on the server, client 0's
// alpha is that of the last update, at first 1e-4, made ten times smaller as long as that lowers
// the whole objective further, or ten times larger until it falls at all (in the paper it only
// grows). Without the term of alpha (--control: alpha = 0, plain CSL) updates may diverge where
// client 0 has fewer rows than features.
#include <algorithm>
#include <numeric>

#include "fit/exchange/star.h"
#include "fit/methods/rows.h"
#include "fit/problem/minimize.h"
#include "fit/problem/vectors.h"

namespace tandem::fit {
namespace {

constexpr double kFirstAlpha = 1e-4, kMinAlpha = 1e-8, kMaxAlpha = 1e8;

class ProxCsl final : public Method {
 public:
  explicit ProxCsl(const Setup& setup)
      : Method(setup.problem.optimum()), setup_(setup), x_(setup.problem.features(), 0.0) {}

  /// The first round averages the local answers; each later one is an update.
  FloatCount run_round(int64_t round) override {
    const int64_t d = int64_t(x_.size());
    if (round == 1) {
      average_local_answers(setup_, x_);
      return {d, 0};
    }
    Vector mean(x_.size(), 0.0);
    collect_gradients(setup_, x_, mean);
    FloatCount floats{d, d};
    if (setup_.options.control) {
      if (setup_.channel.has_server()) x_ = solve(x_, mean, 0);
      return floats;
    }
    if (round == 2) {
      value_ = collect_value(x_, floats);
    }
    const Vector last = x_;
    if (try_alpha(alpha_, last, mean, floats)) {
      while (alpha_ > kMinAlpha && try_alpha(alpha_ / 10, last, mean, floats)) alpha_ /= 10;
      return floats;
    }
    while (alpha_ <= kMaxAlpha) {
      alpha_ *= 10;
      if (try_alpha(alpha_, last, mean, floats)) return floats;
    }
    is_finished_ = true;  // no trial falls: x is the answer, but for rounding
    return floats;
  }

  std::vector<std::span<const double>> answers() const override {
    if (!setup_.channel.has_server()) return {};
    return {x_};
  }

  std::vector<Setting> settings() const override {
    return {{"first_alpha", setup_.options.control ? 0 : kFirstAlpha}};
  }
  bool is_finished() const override { return is_finished_; }

 private:
  /// Moves to the trial of `alpha` from `last` if the whole objective is lower there.
  bool try_alpha(double alpha, const Vector& last, std::span<const double> mean,
                 FloatCount& floats) {
    const Vector trial = setup_.channel.has_server() ? solve(last, mean, alpha) : last;
    const double value = collect_value(trial, floats);
    if (!(value < value_)) return false;
    value_ = value;
    x_ = trial;
    return true;
  }

  Vector solve(const Vector& last, std::span<const double> mean, double alpha) const {
    const Objective f = setup_.problem.client(0);
    Vector linear(last.size()), v = last;
    f.gradient(last, linear);
    for (size_t k = 0; k < linear.size(); ++k) linear[k] = mean[k] - linear[k];
    minimize(
        {.f = f, .linear = linear, .attraction = alpha, .center = last, .l1 = setup_.problem.l1()},
        v, kFlatTolerance);
    return v;
  }

  /// Value of the whole objective at `x` of the server, on all ranks.
  double collect_value(const Vector& x, FloatCount& floats) {
    const std::vector<int> all = all_clients(setup_.channel);
    Vector at(x.size());
    broadcast_down(setup_.channel, all, x, [&](int, std::span<const double> from) {
      std::copy(from.begin(), from.end(), at.begin());
    });
    double sum = 0;
    send_up(
        setup_.channel, all, [](int) { return size_t(1); },
        [&](int client, std::span<double> to) { to[0] = setup_.problem.client(client).value(at); },
        [&](int, std::span<const double> from) { sum += from[0]; });
    floats.up += 1;
    floats.down += int64_t(x.size()) + 1;
    double value = sum / setup_.channel.clients() + setup_.problem.l1() * l1_norm(at);
    const Vector of_server{value};
    broadcast_down(setup_.channel, all, of_server,
                   [&](int, std::span<const double> from) { value = from[0]; });
    return value;
  }

  const Setup setup_;
  Vector x_;  // of the server
  double value_ = 0;
  double alpha_ = kFirstAlpha;
  bool is_finished_ = false;
};

}  // namespace

const MethodRow& proxcsl_row() {
  static const MethodRow row{"proxcsl",
                             "the mean of local answers, then updates on one client's rows",
                             {},
                             true,
                             "alpha = 0: updates are not attracted to the last point",
                             nullptr,
                             [](const Setup& setup) -> std::unique_ptr<Method> {
                               return std::make_unique<ProxCsl>(setup);
                             }};
  return row;
}

}  // namespace tandem::fit
