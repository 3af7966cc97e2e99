#include "fit/methods/local_steps.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "fit/draws.h"
#include "fit/exchange/star.h"
#include "fit/problem/vectors.h"
#include "tandem/error.h"

namespace tandem::fit {
namespace {

class LocalSteps final : public Method {
 public:
  LocalSteps(const Setup& setup, const LocalStepsParams& params)
      : Method(setup.problem.optimum()),
        setup_(setup),
        params_(params),
        step_(setup.options.step.value_or(1) * 2 /
              (setup.problem.max_smoothness() + setup.problem.l2())),
        mean_(setup.problem.features(), 0.0) {
    const Shard local = setup.channel.local_clients();
    for (int64_t c = local.begin; c < local.begin + local.count; ++c) {
      clients_.push_back({setup.problem.client(int(c)), mean_, Vector(mean_.size(), 0.0)});
    }
  }

  FloatCount run_round(int64_t round) override {
    const Cohort cohort = draw_cohort(round);
    const std::span<const int> participants = cohort.clients;
    const int64_t d = int64_t(mean_.size());
    const bool partial = params_.cohort < setup_.channel.clients() && !params_.partial_mean;
    if (partial) {
      broadcast_down(setup_.channel, participants, mean_,
                     [&](int c, std::span<const double> from) { assign(local(c).x, from); });
    }
    for (const int c : participants) {
      if (setup_.channel.is_local(c)) take_steps(local(c), cohort.num_steps);
    }
    send_masked_up(cohort);
    send_mean_down(cohort, partial);
    const int64_t masked = cohort.largest_message;
    return partial ? FloatCount{masked, d + masked} : FloatCount{masked, d};
  }

  std::vector<std::span<const double>> answers() const override {
    if (!setup_.channel.has_server()) return {};
    return {mean_};
  }

  std::vector<Setting> settings() const override {
    return {{"p", params_.p},
            {"step", step_},
            {"cohort", double(params_.cohort)},
            {"sparsity", double(params_.sparsity)}};
  }

 private:
  struct Client {
    Objective f;
    Vector x, h;
  };

  /// Clients of a round with the columns of the mask that each has, and their number of steps.
  struct Cohort {
    std::vector<int> clients;  // in increasing order
    std::vector<int> mean_of;  // whose values enter the mean
    std::vector<int> column;   // by client; -1: not in mean_of
    int64_t num_steps = 0;
    int64_t largest_message = 0;
  };

  Client& local(int client) {
    return clients_[size_t(client - setup_.channel.local_clients().begin)];
  }

  static void assign(Vector& to, std::span<const double> from) {
    std::copy(from.begin(), from.end(), to.begin());
  }

  Cohort draw_cohort(int64_t round) const {
    const int n = setup_.channel.clients(), c = params_.cohort;
    Draws draws(setup_.options.seed, "fit cohort", round);
    Cohort cohort;
    for (int i = 0; i < n; ++i) {
      if (setup_.options.is_alive(i, round)) cohort.clients.push_back(i);
    }
    if (int(cohort.clients.size()) < c) {
      throw Error(fmt::format("round {}: {} of {} clients are left: a cohort is {} (--cohort)",
                              round, cohort.clients.size(), n, c));
    }
    draws.shuffle(cohort.clients);
    cohort.mean_of.assign(cohort.clients.begin(), cohort.clients.begin() + c);
    cohort.column.assign(size_t(n), -1);
    for (int column = 0; column < c; ++column)
      cohort.column[size_t(cohort.mean_of[size_t(column)])] = column;
    std::sort(cohort.mean_of.begin(), cohort.mean_of.end());
    if (params_.partial_mean) {
      cohort.clients.resize(size_t(n));
      std::iota(cohort.clients.begin(), cohort.clients.end(), 0);
    } else {
      cohort.clients = cohort.mean_of;
    }
    cohort.num_steps = draws.geometric(params_.p);
    for (const int client : cohort.mean_of)
      cohort.largest_message = std::max(cohort.largest_message, int64_t(count(cohort, client)));
    return cohort;
  }

  /// Whether `client`'s column of the mask has coordinate k: s consecutive columns in a row, the
  /// next row from where this one ends.
  bool is_masked_in(const Cohort& cohort, int client, size_t k) const {
    const size_t c = size_t(params_.cohort), s = size_t(params_.sparsity);
    const int column = cohort.column[size_t(client)];
    return column >= 0 && (size_t(column) + c - k * s % c) % c < s;
  }

  size_t count(const Cohort& cohort, int client) const {
    size_t ones = 0;
    for (size_t k = 0; k < mean_.size(); ++k) ones += is_masked_in(cohort, client, k);
    return ones;
  }

  void take_steps(Client& client, int64_t steps) const {
    Vector gradient(mean_.size());
    for (int64_t i = 0; i < steps; ++i) {
      client.f.gradient(client.x, gradient);
      for (size_t k = 0; k < gradient.size(); ++k)
        client.x[k] -= step_ * (gradient[k] - client.h[k]);
    }
  }

  void send_masked_up(const Cohort& cohort) {
    Vector sum(mean_.size(), 0.0);
    send_up(
        setup_.channel, cohort.mean_of, [&](int c) { return count(cohort, c); },
        [&](int c, std::span<double> to) {
          size_t at = 0;
          for (size_t k = 0; k < mean_.size(); ++k)
            if (is_masked_in(cohort, c, k)) to[at++] = local(c).x[k];
        },
        [&](int c, std::span<const double> from) {
          size_t at = 0;
          for (size_t k = 0; k < mean_.size(); ++k)
            if (is_masked_in(cohort, c, k)) sum[k] += from[at++];
        });
    if (!setup_.channel.has_server()) return;
    for (size_t k = 0; k < mean_.size(); ++k) mean_[k] = sum[k] / params_.sparsity;
  }

  /// Sends xbar, of which a partial cohort needs its masked coordinates, and updates h.
  void send_mean_down(const Cohort& cohort, bool partial) {
    const double c = params_.cohort, s = params_.sparsity;
    const double eta = params_.p * c * (s - 1) / (s * (c - 1));
    const bool masked = partial && !params_.all_coordinates;
    const auto is_sent = [&](int client, size_t k) {
      return !masked || is_masked_in(cohort, client, k);
    };
    send_down(
        setup_.channel, cohort.clients,
        [&](int client) { return masked ? count(cohort, client) : mean_.size(); },
        [&](int client, std::span<double> to) {
          size_t at = 0;
          for (size_t k = 0; k < mean_.size(); ++k)
            if (is_sent(client, k)) to[at++] = mean_[k];
        },
        [&](int client, std::span<const double> from) {
          Client& to = local(client);
          size_t at = 0;
          for (size_t k = 0; k < mean_.size(); ++k) {
            if (!is_sent(client, k)) continue;
            const double mean = from[at++];
            if (is_masked_in(cohort, client, k) || params_.all_coordinates || params_.partial_mean)
              to.h[k] += eta / step_ * (mean - to.x[k]);
            to.x[k] = mean;
          }
        });
  }

  const Setup setup_;
  const LocalStepsParams params_;
  const double step_;
  Vector mean_;  // xbar, of the server
  std::vector<Client> clients_;
};

}  // namespace

double choose_p(const Setup& setup, int sparsity) {
  return setup.options.p.value_or(
      std::min(1.0, std::sqrt(setup.channel.clients() / (sparsity * setup.problem.kappa()))));
}

void check_local_steps(const FitOptions& options, int cohort, int sparsity) {
  const int n = options.clients;
  if (n < 2) {
    throw InvalidArgument(
        fmt::format("--clients {}: control variates take several clients: expected at least 2", n));
  }
  if (cohort < 2 || cohort > n)
    throw InvalidArgument(fmt::format("--cohort {}: {} clients: expected 2 to {}", cohort, n, n));
  if (sparsity < 2 || sparsity > cohort) {
    throw InvalidArgument(fmt::format("--sparsity {}: a cohort of {} clients: expected 2 to {}",
                                      sparsity, cohort, cohort));
  }
  if (const double p = options.p.value_or(1); !(p > 0 && p <= 1))
    throw InvalidArgument(fmt::format("--p {}: expected above 0 and at most 1", p));
}

std::unique_ptr<Method> make_local_steps(const Setup& setup, const LocalStepsParams& params) {
  return std::make_unique<LocalSteps>(setup, params);
}

}  // namespace tandem::fit
