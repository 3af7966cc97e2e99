// Block coordinate descent by tokens that walk over a graph of clients (API-BCD, arXiv 2202.03263).
// Token m has a share z_m of the mean of the clients' answers. In a round it visits a client i and
// then moves to a random neighbour:
//   x_i+ = argmin f_i(x) + tau / 2 |x - sum_k zhat_ik|^2     zhat_ik: the newest z_k that i knows
//   z_m += (x_i+ - x_i) / n
// For any number of tokens and any walk sum_m z_m converges to the minimum over z of
// sum_i min_x f_i(x) + tau / 2 |x - z|^2: the target. Its distance to the optimum is the bias,
// which falls with tau.
//
// Other than in the paper, the center is the sum of the shares, and tokens carry what their holders
// know of the other shares. With the mean of the tokens instead, every token must visit all clients
// as often as if it were the only one; with shares that do not travel, several tokens are no faster
// than one, as the others' shares are as old as the last visits.
//
// A client remembers what it passed on. If the next holder has failed, the token is made again from
// that and goes elsewhere: the failed client's state is that of its last completed visit.
#include <fmt/format.h>

#include <algorithm>

#include "fit/fit.h"
#include "fit/methods/api_bcd_async.h"
#include "fit/methods/rows.h"
#include "fit/methods/token_walk.h"
#include "fit/problem/penalized.h"
#include "tandem/error.h"

namespace tandem::fit {
namespace {

class ApiBcd final : public Method {
 public:
  ApiBcd(const Setup& setup, const ApiBcdParams& params, Vector target)
      : ApiBcd(setup, params, std::make_shared<const Vector>(std::move(target))) {}

  FloatCount run_round(int64_t round) override {
    std::vector<TokenMove> moves;
    for (int m = 0; m < params_.tokens; ++m) {
      Token& token = tokens_[size_t(m)];
      if (!token.visit || token.visit->round != round) continue;
      const int holder = token.visit->client;
      if (setup_.channel.is_local(holder)) {
        clients_.visit(holder, m, round, token.table);
        token.z = token.table.sum();
      }
      token.visit = token.walk.next(*token.visit);
      if (token.visit) append_moves(m, holder, *token.visit, moves);
    }
    return move(moves);
  }

  std::vector<std::span<const double>> answers() const override {
    std::vector<std::span<const double>> answers;
    for (const Token& token : tokens_) {
      if (setup_.channel.is_local(token.holder)) answers.emplace_back(token.z);
    }
    return answers;
  }

  bool moves_answers() const override { return true; }

  bool is_finished() const override {
    return std::ranges::none_of(tokens_,
                                [](const Token& token) { return token.visit.has_value(); });
  }

  std::vector<Setting> settings() const override { return params_.settings(); }

 private:
  struct Token {
    TokenWalk walk;
    std::optional<TokenWalk::Visit> visit;  // the next one
    int holder = 0;
    TokenTable table;  // valid on the holder's rank, as is its sum
    Vector z;
  };

  ApiBcd(const Setup& setup, const ApiBcdParams& params, std::shared_ptr<const Vector> target)
      : Method(*target),
        target_owner_(std::move(target)),
        setup_(setup),
        params_(params),
        graph_(choose_graph(setup.options)),
        clients_(setup, params) {
    const size_t features = setup.problem.features();
    for (int m = 0; m < params.tokens; ++m) {
      const TokenWalk walk(graph_, setup.options, m);
      const auto visit = walk.first();
      tokens_.push_back({walk, visit, visit ? visit->client : 0,
                         TokenTable(params.tokens, features), Vector(features, 0.0)});
    }
  }

  /// Sends what the tokens carry, and returns the numbers of the busiest client.
  FloatCount move(const std::vector<TokenMove>& moves) {
    const int64_t floats = params_.floats(setup_.problem);
    std::vector<Message> plan;
    for (const auto& [token, from, to] : moves)
      plan.push_back({from, to, size_t(floats) * sizeof(double)});
    setup_.channel.exchange(
        plan,
        [&](size_t i, std::span<std::byte> to) {
          std::ranges::copy(tokens_[size_t(moves[i].token)].table.numbers(),
                            as_doubles(to).begin());
        },
        [&](size_t i, std::span<const std::byte> from) {
          Token& token = tokens_[size_t(moves[i].token)];
          std::ranges::copy(as_doubles(from), token.table.numbers().begin());
          token.z = token.table.sum();
        });
    for (const auto& [token, from, to] : moves) tokens_[size_t(token)].holder = to;
    return count_floats(moves, floats);
  }

  const std::shared_ptr<const Vector> target_owner_;
  const Setup setup_;
  const ApiBcdParams params_;
  const Graph graph_;
  TokenClients clients_;
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

ApiBcdParams choose_params(const Setup& setup) {
  return {setup.options.tokens.value_or(1),
          setup.options.tau.value_or(setup.problem.max_smoothness())};
}

}  // namespace

const MethodRow& api_bcd_row() {
  static const MethodRow row{
      "api-bcd",
      "tokens walk over a graph; their holders solve near all tokens",
      {&kGraphOption, &kTokensOption, &kTauOption, &kAsyncOption, &kFailOption},
      false,
      nullptr,
      check_api_bcd,
      [](const Setup& setup) -> std::unique_ptr<Method> {
        const ApiBcdParams params = choose_params(setup);
        return std::make_unique<ApiBcd>(setup, params,
                                        penalized_optimum(setup.problem, params.tau));
      },
      [](const Setup& setup, const std::function<void(const FitPoint&)>& report) {
        const ApiBcdParams params = choose_params(setup);
        check_async_walk(setup, params);
        return run_async_walk(setup, params, penalized_optimum(setup.problem, params.tau), report);
      }};
  return row;
}

}  // namespace tandem::fit
