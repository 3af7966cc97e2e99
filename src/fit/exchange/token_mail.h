// Messages of tokens between ranks that share no rounds: a token is put to the rank of its next
// client, and found there when it has come. Each rank and token has a box on every rank, so that a
// box and its signal have one writer. Rank 0 also counts the tokens' votes, tells the others that
// tokens are visited, and ends the walk.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "fit/exchange/channel.h"

namespace tandem::fit {

class TokenMail {
 public:
  /// State of a token after a visit.
  enum class Vote : uint8_t { going, within_tolerance, finished };

  struct Arrival {
    int token = 0, client = 0;
    int64_t round = 0;
    std::span<const double> message;  ///< until the token's next `send` by this rank
  };

  /// Bytes of the boxes on each of `ranks`.
  static size_t bytes(int ranks, int tokens, size_t floats) {
    return size_t(ranks) * size_t(tokens) * floats * sizeof(double);
  }

  /// Collective. Messages have `floats` numbers.
  TokenMail(Channel& channel, int tokens, size_t floats);
  ~TokenMail();
  TokenMail(const TokenMail&) = delete;
  TokenMail& operator=(const TokenMail&) = delete;

  /// Sends `token` to a client that it visits in `round`. With `failed`, also to that client,
  /// which loses it.
  void send(int token, int client, int64_t round, std::optional<int> failed,
            std::span<const double> message);
  /// A token that has come to this rank, in the order of (round, token), if there is one.
  std::optional<Arrival> receive();

  /// Call after each visit. Rounds of a token's votes grow.
  void vote(int token, int64_t round, Vote vote);
  /// Whether the walk has ended: the last votes of all tokens that have reached rank 0 are other
  /// than `going`.
  bool is_stopped();
  /// Collective, after all ranks have stopped: lets the walk go on.
  void resume();

  /// Sleeps for a moment. Throws Timeout after the communicator's deadline without a visit of any
  /// token on any rank, and Aborted.
  void wait_a_moment();

 private:
  using Clock = std::chrono::steady_clock;

  /// On rank 0: raises the others' `beat_signal` if votes have grown since it last did so.
  void beat();
  int arrival_signal(int source, int token) const { return source * tokens_ + token; }
  int vote_signal(int source, int token) const { return arrival_signal(ranks() + source, token); }
  int stop_signal() const { return arrival_signal(2 * ranks(), 0); }
  int beat_signal() const { return stop_signal() + 1; }
  int ranks() const { return comm_.size(); }
  size_t box(int source, int token) const {
    return size_t(arrival_signal(source, token)) * floats_ * sizeof(double);
  }

  Channel& channel_;
  Communicator& comm_;
  const int tokens_;
  const size_t floats_;
  const std::shared_ptr<SymmetricBuffer> buffer_;
  std::vector<uint64_t> seen_;                // by arrival signal
  std::vector<std::vector<double>> sources_;  // of puts, by token
  uint64_t generation_ = 1;                   // of is_stopped
  uint64_t beats_ = 0;                        // raised by rank 0, seen by the others
  uint64_t votes_ = 0;                        // sum of the votes at the last beat of rank 0
  Clock::time_point last_beat_ = Clock::now();
  Clock::time_point last_visit_ = last_beat_;  // of any token, as far as this rank knows
};

}  // namespace tandem::fit
