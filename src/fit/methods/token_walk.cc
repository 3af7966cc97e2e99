#include "fit/methods/token_walk.h"

#include <algorithm>

#include "fit/draws.h"

namespace tandem::fit {
namespace {

/// Number of the elements of the commonest value.
int64_t max_count(std::vector<int> values) {
  std::ranges::sort(values);
  size_t max = 0, begin = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i] != values[begin]) begin = i;
    max = std::max(max, i - begin + 1);
  }
  return int64_t(max);
}

}  // namespace

std::optional<TokenWalk::Visit> TokenWalk::first() const {
  const int start = int(int64_t(token_) * graph_.size() / tokens());
  for (int64_t round = 1; round <= options_.max_rounds; round = next_return(round)) {
    for (int step = 0; step < graph_.size(); ++step) {
      const int client = (start + step) % graph_.size();
      if (options_.is_alive(client, round)) return Visit{client, round};
    }
  }
  return std::nullopt;
}

std::optional<TokenWalk::Visit> TokenWalk::next(const Visit& from) const {
  const auto& neighbours = graph_.neighbours[size_t(from.client)];
  Draws draws(options_.seed, "fit walk", from.round * tokens() + token_);
  const int to = neighbours.empty() ? from.client : neighbours[draws.below(neighbours.size())];
  for (int64_t round = from.round + 1; round <= options_.max_rounds; round = next_return(round)) {
    if (options_.is_alive(to, round)) return Visit{to, round};
    if (options_.is_alive(from.client, round))
      return Visit{choose_alive(from.client, round), round, to};
  }
  return std::nullopt;
}

int64_t TokenWalk::next_return(int64_t round) const {
  int64_t next = options_.max_rounds + 1;
  for (const Failure& failure : options_.failures)
    if (failure.last >= round && failure.last < next) next = failure.last + 1;
  return next;
}

int TokenWalk::choose_alive(int from, int64_t round) const {
  std::vector<int> alive;
  for (const int neighbour : graph_.neighbours[size_t(from)]) {
    if (options_.is_alive(neighbour, round)) alive.push_back(neighbour);
  }
  Draws draws(options_.seed, "fit walk made again", round * tokens() + token_);
  return alive.empty() ? from : alive[draws.below(alive.size())];
}

void append_moves(int token, int client, const TokenWalk::Visit& next,
                  std::vector<TokenMove>& moves) {
  if (next.failed != TokenWalk::kNone) moves.push_back({token, client, next.failed});
  moves.push_back({token, client, next.client});
}

FloatCount count_floats(std::span<const TokenMove> moves, int64_t floats) {
  std::vector<int> senders, receivers;
  for (const TokenMove& move : moves) {
    senders.push_back(move.from);
    receivers.push_back(move.to);
  }
  return {max_count(senders) * floats, max_count(receivers) * floats};
}

}  // namespace tandem::fit
