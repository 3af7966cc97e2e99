#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "fit/exchange/star.h"
#include "fit/methods/rows.h"
#include "fit/problem/minimize.h"
#include "fit/problem/vectors.h"
#include "tandem/error.h"

namespace tandem::fit {

std::vector<int> all_clients(const Channel& channel) {
  std::vector<int> all(static_cast<size_t>(channel.clients()));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

void collect_gradients(const Setup& setup, std::span<const double> x, std::span<double> mean) {
  const std::vector<int> all = all_clients(setup.channel);
  Vector at(x.size());
  broadcast_down(setup.channel, all, x, [&](int, std::span<const double> from) {
    std::copy(from.begin(), from.end(), at.begin());
  });
  send_up(
      setup.channel, all, [&](int) { return x.size(); },
      [&](int client, std::span<double> to) { setup.problem.client(client).gradient(at, to); },
      [&](int, std::span<const double> from) { add_scaled(mean, 1, from); });
  for (double& value : mean) value /= double(all.size());
}

void average_local_answers(const Setup& setup, std::span<double> mean) {
  const std::vector<int> all = all_clients(setup.channel);
  std::fill(mean.begin(), mean.end(), 0.0);
  send_up(
      setup.channel, all, [&](int) { return mean.size(); },
      [&](int client, std::span<double> to) {
        std::fill(to.begin(), to.end(), 0.0);
        const Objective f = setup.problem.client(client);
        if (minimize({.f = f, .l1 = setup.problem.l1()}, to, kFlatTolerance)) return;
        throw Error(fmt::format("client {}: the answer to its {} rows has not converged", client,
                                f.rows()));
      },
      [&](int, std::span<const double> from) { add_scaled(mean, 1, from); });
  for (double& value : mean) value /= double(all.size());
}

}  // namespace tandem::fit
