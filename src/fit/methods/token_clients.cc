#include "fit/methods/token_clients.h"

#include <algorithm>

#include "fit/problem/minimize.h"
#include "fit/problem/vectors.h"

namespace tandem::fit {

void TokenTable::merge(const TokenTable& other) {
  for (int m = 0; m < tokens(); ++m) {
    if (other.round(m) <= round(m)) continue;
    round(m) = other.round(m);
    std::ranges::copy(other.share(m), share(m).begin());
  }
}

Vector TokenTable::sum() const {
  Vector sum(width_ - 1, 0.0);
  for (int m = 0; m < tokens(); ++m) add_scaled(sum, 1, share(m));
  return sum;
}

TokenClients::TokenClients(const Setup& setup, const ApiBcdParams& params)
    : setup_(setup), params_(params) {
  const size_t features = setup.problem.features();
  const Shard range = setup.channel.local_clients();
  for (int64_t c = range.begin; c < range.begin + range.count; ++c) {
    clients_.push_back(
        {setup.problem.client(int(c)), Vector(features, 0.0), TokenTable(params.tokens, features)});
  }
}

void TokenClients::visit(int number, int token, int64_t round, TokenTable& table) {
  Client& client = clients_[size_t(number - setup_.channel.local_clients().begin)];
  client.known.merge(table);
  const Vector center = client.known.sum(), before = client.x;
  minimize({.f = client.f, .attraction = params_.tau, .center = center}, client.x);
  const std::span<double> share = client.known.share(token);
  const double clients = setup_.channel.clients();
  for (size_t k = 0; k < share.size(); ++k) share[k] += (client.x[k] - before[k]) / clients;
  client.known.round(token) = double(round);
  table = client.known;
}

}  // namespace tandem::fit
