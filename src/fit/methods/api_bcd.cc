// Block coordinate descent by tokens that walk over a graph of clients (API-BCD, arXiv 2202.03263).
// In a round each token m visits a client i and then moves to a random neighbour:
//   zhat_im = z_m
//   x_i+ = argmin f_i(x) + tau / 2 |x - mean_m zhat_im|^2
//   z_m += (x_i+ - x_im) / n;  x_im = x_i+        x_im: x_i as token m saw it last
// With that memory for each client and token every token converges to the same point, the minimum
// over z of sum_i min_x f_i(x) + tau / 2 |x - z|^2, for any walk: the target. Its distance to the
// optimum is the bias, which falls with tau.
//
// A client remembers what it passed on. If the next holder has failed, the token is made again from
// that and goes elsewhere: the failed client's state is that of its last completed visit. A token
// whose first holder has failed begins at the next client.
#include <fmt/format.h>

#include <algorithm>

#include "fit/draws.h"
#include "fit/exchange/graph.h"
#include "fit/methods/rows.h"
#include "fit/problem/minimize.h"
#include "fit/problem/penalized.h"
#include "fit/problem/vectors.h"
#include "tandem/error.h"

namespace tandem::fit {
namespace {

struct ApiBcdParams {
  int tokens = 1;
  double tau = 0;
};

class ApiBcd final : public Method {
 public:
  ApiBcd(const Setup& setup, const ApiBcdParams& params, Vector target)
      : ApiBcd(setup, params, std::make_shared<const Vector>(std::move(target))) {}

  FloatCount run_round(int64_t round) override {
    Draws draws(setup_.options.seed, "fit walk", round);
    const auto is_alive = [&](int client) { return setup_.options.is_alive(client, round); };
    std::vector<int> sent(size_t(setup_.channel.clients()), 0), received(sent);
    std::vector<Move> moves;
    for (int m = 0; m < params_.tokens; ++m) {
      Token& token = tokens_[size_t(m)];
      if (is_alive(token.holder)) continue;
      if (token.last_holder == kNone) {
        token.holder = next_alive(token.holder, is_alive);
        continue;
      }
      const int to = choose_alive(token.last_holder, is_alive, draws);
      if (to >= 0) moves.push_back({m, token.last_holder, to});
    }
    move(moves, sent, received);
    moves.clear();
    for (int m = 0; m < params_.tokens; ++m) {
      const int holder = tokens_[size_t(m)].holder;
      if (!is_alive(holder)) continue;
      if (setup_.channel.is_local(holder)) visit(local(holder), m);
      const auto& neighbours = graph_.neighbours[size_t(holder)];
      const int to = neighbours.empty() ? holder : neighbours[draws.below(neighbours.size())];
      moves.push_back({m, holder, to});
    }
    move(moves, sent, received);
    const int64_t d = int64_t(setup_.problem.features());
    return {d * *std::ranges::max_element(sent), d * *std::ranges::max_element(received)};
  }

  std::vector<std::span<const double>> answers() const override {
    std::vector<std::span<const double>> answers;
    for (const Token& token : tokens_) {
      if (setup_.channel.is_local(token.holder)) answers.emplace_back(token.z);
    }
    return answers;
  }

  bool moves_answers() const override { return true; }

  std::vector<Setting> settings() const override {
    return {{"tokens", double(params_.tokens)}, {"tau", params_.tau}};
  }

 private:
  static constexpr int kNone = -1;

  struct Client {
    Objective f;
    Vector x;
    std::vector<Vector> copies;  // of each token, after the last visit
    std::vector<Vector> seen;    // x at the last visit of each token
  };
  struct Token {
    int holder = 0;
    int last_holder = kNone;  // kNone before the first visit, while z is 0 on all ranks
    Vector z;                 // valid on the holder's rank
  };
  struct Move {
    int token, from, to;
  };

  ApiBcd(const Setup& setup, const ApiBcdParams& params, std::shared_ptr<const Vector> target)
      : Method(*target),
        target_owner_(std::move(target)),
        setup_(setup),
        params_(params),
        graph_(choose_graph(setup.options)) {
    const Vector zero(setup.problem.features(), 0.0);
    const std::vector<Vector> zeros(size_t(params.tokens), zero);
    const Shard range = setup.channel.local_clients();
    for (int64_t c = range.begin; c < range.begin + range.count; ++c)
      clients_.push_back({setup.problem.client(int(c)), zero, zeros, zeros});
    for (int m = 0; m < params.tokens; ++m) {
      const int holder = int(int64_t(m) * setup.channel.clients() / params.tokens);
      tokens_.push_back({.holder = holder, .z = zero});
    }
  }

  Client& local(int client) {
    return clients_[size_t(client - setup_.channel.local_clients().begin)];
  }

  /// The first client from `from` on that takes part, or `from`.
  template <typename IsAlive>
  int next_alive(int from, const IsAlive& is_alive) const {
    for (int step = 1; step < graph_.size(); ++step) {
      const int client = (from + step) % graph_.size();
      if (is_alive(client)) return client;
    }
    return from;
  }

  /// A neighbour of `from` that takes part, or `from`; -1 if it does not take part itself.
  template <typename IsAlive>
  int choose_alive(int from, const IsAlive& is_alive, Draws& draws) const {
    if (!is_alive(from)) return -1;
    std::vector<int> alive;
    for (const int neighbour : graph_.neighbours[size_t(from)]) {
      if (is_alive(neighbour)) alive.push_back(neighbour);
    }
    return alive.empty() ? from : alive[draws.below(alive.size())];
  }

  void visit(Client& client, int m) {
    Vector& z = tokens_[size_t(m)].z;
    client.copies[size_t(m)] = z;
    Vector center(z.size(), 0.0);
    for (const Vector& copy : client.copies) add_scaled(center, 1.0 / params_.tokens, copy);
    minimize({.f = client.f, .attraction = params_.tau, .center = center}, client.x);
    Vector& seen = client.seen[size_t(m)];
    const double clients = setup_.channel.clients();
    for (size_t k = 0; k < z.size(); ++k) z[k] += (client.x[k] - seen[k]) / clients;
    seen = client.x;
    client.copies[size_t(m)] = z;
  }

  /// Sends each token's copy at `from` to `to`.
  void move(const std::vector<Move>& moves, std::vector<int>& sent, std::vector<int>& received) {
    std::vector<Message> plan;
    for (const auto& [token, from, to] : moves) {
      plan.push_back({from, to, setup_.problem.features() * sizeof(double)});
      ++sent[size_t(from)];
      ++received[size_t(to)];
    }
    setup_.channel.exchange(
        plan,
        [&](size_t i, std::span<std::byte> to) {
          const Move& each = moves[i];
          std::ranges::copy(local(each.from).copies[size_t(each.token)], as_doubles(to).begin());
        },
        [&](size_t i, std::span<const std::byte> from) {
          std::ranges::copy(as_doubles(from), tokens_[size_t(moves[i].token)].z.begin());
        });
    for (const auto& [token, from, to] : moves) {
      tokens_[size_t(token)].holder = to;
      tokens_[size_t(token)].last_holder = from;
    }
  }

  const std::shared_ptr<const Vector> target_owner_;
  const Setup setup_;
  const ApiBcdParams params_;
  const Graph graph_;
  std::vector<Client> clients_;
  std::vector<Token> tokens_;
};

void check_api_bcd(const FitOptions& options) {
  const int tokens = options.tokens.value_or(1);
  if (tokens < 1 || tokens > options.clients) {
    throw InvalidArgument(fmt::format("--tokens {}: {} clients: expected 1 to {}", tokens,
                                      options.clients, options.clients));
  }
  const double tau = options.tau.value_or(1);
  if (!(tau > 0 && tau < 1e12))
    throw InvalidArgument(fmt::format("--tau {}: expected above 0 and below 1e12", tau));
  choose_graph(options);
}

}  // namespace

const MethodRow& api_bcd_row() {
  static const MethodRow row{"api-bcd",
                             "tokens walk over a graph; their holders solve near all tokens",
                             {&kGraphOption, &kTokensOption, &kTauOption, &kFailOption},
                             false,
                             nullptr,
                             check_api_bcd,
                             [](const Setup& setup) -> std::unique_ptr<Method> {
                               const ApiBcdParams params{
                                   setup.options.tokens.value_or(1),
                                   setup.options.tau.value_or(setup.problem.max_smoothness())};
                               return std::make_unique<ApiBcd>(
                                   setup, params, penalized_optimum(setup.problem, params.tau));
                             }};
  return row;
}

}  // namespace tandem::fit
