// Walk of a token of API-BCD over the clients: a function of graph, seed and failures, so that all
// ranks know it.
#pragma once

#include <optional>

#include "fit/exchange/graph.h"
#include "fit/methods/method.h"

namespace tandem::fit {

class TokenWalk {
 public:
  static constexpr int kNone = -1;

  struct Visit {
    int client = 0;
    int64_t round = 0;  ///< of the token, from 1; rounds in which it cannot move count
    /// Client that failed with the token on its way here: the client before has sent it twice.
    int failed = kNone;
  };

  /// `graph` and `options` must outlive the walk.
  TokenWalk(const Graph& graph, const FitOptions& options, int token)
      : graph_(graph), options_(options), token_(token) {}

  /// First visit: tokens begin evenly spread, at the next client if theirs has failed. nullopt if
  /// there is none up to round max_rounds.
  std::optional<Visit> first() const;
  /// The visit after `from`, of a random neighbour. If it has failed, the token goes from `from` to
  /// another one, or stays there; if both have failed, it waits for the first to be back. nullopt:
  /// as above.
  std::optional<Visit> next(const Visit& from) const;

 private:
  int tokens() const { return options_.tokens.value_or(1); }
  int choose_alive(int from, int64_t round) const;
  /// First round after `round` in which a client may be back; max_rounds + 1 if there is none.
  int64_t next_return(int64_t round) const;

  const Graph& graph_;
  const FitOptions& options_;
  const int token_;
};

/// Message in which a token goes from one client to another.
struct TokenMove {
  int token, from, to;
};

/// Appends the messages in which `token` leaves `client` for `next`.
void append_moves(int token, int client, const TokenWalk::Visit& next,
                  std::vector<TokenMove>& moves);
/// Numbers of the client that sends most, and of the one that receives most, `floats` a move.
FloatCount count_floats(std::span<const TokenMove> moves, int64_t floats);

}  // namespace tandem::fit
