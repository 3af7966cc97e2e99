// An arrival signal is round * clients + client + 1, a vote 4 * round + vote: they grow with the
// token's rounds. A token that comes to a rank proves that what the rank has sent of it before was
// delivered, so `sources_` can be written again.
#include "fit/exchange/token_mail.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "tandem/error.h"

namespace tandem::fit {

TokenMail::TokenMail(Channel& channel, int tokens, size_t floats)
    : channel_(channel),
      comm_(channel.communicator()),
      tokens_(tokens),
      floats_(floats),
      buffer_(comm_.allocate(bytes(comm_.size(), tokens, floats), 2 * comm_.size() * tokens + 2)),
      seen_(size_t(comm_.size() * tokens), 0),
      sources_(size_t(tokens), std::vector<double>(floats, 0.0)) {}

TokenMail::~TokenMail() {
  try {
    comm_.flush();
  } catch (const Error&) {
    // The world has failed; the transport releases its sources before it reports that.
  }
}

void TokenMail::send(int token, int client, int64_t round, std::optional<int> failed,
                     std::span<const double> message) {
  std::vector<double>& source = sources_[size_t(token)];
  std::ranges::copy(message, source.begin());
  const int signal = arrival_signal(comm_.rank(), token);
  const auto put = [&](int to, uint64_t epoch) {
    channel_.put(to, *buffer_, box(comm_.rank(), token), std::as_bytes(std::span(source)), signal,
                 epoch);
  };
  if (failed) {
    put(*failed, 0);
    comm_.flush();  // nothing proves the delivery of a lost message
  }
  put(client, uint64_t(round) * uint64_t(channel_.clients()) + uint64_t(client) + 1);
}

std::optional<TokenMail::Arrival> TokenMail::receive() {
  const uint64_t clients = uint64_t(channel_.clients());
  std::optional<Arrival> first;
  std::pair<int, uint64_t> mark;  // signal and epoch of `first`
  for (int source = 0; source < ranks(); ++source) {
    for (int token = 0; token < tokens_; ++token) {
      const int signal = arrival_signal(source, token);
      const uint64_t epoch = comm_.read_signal(*buffer_, signal);
      if (epoch <= seen_[size_t(signal)]) continue;
      const int64_t round = int64_t((epoch - 1) / clients);
      if (first && std::pair(first->round, first->token) < std::pair(round, token)) continue;
      const auto* message = reinterpret_cast<const double*>(buffer_->local() + box(source, token));
      first = Arrival{token, int((epoch - 1) % clients), round, {message, floats_}};
      mark = {signal, epoch};
    }
  }
  if (!first) return std::nullopt;
  seen_[size_t(mark.first)] = mark.second;
  return first;
}

void TokenMail::vote(int token, int64_t round, Vote vote) {
  comm_.put(0, *buffer_, 0, nullptr, 0, vote_signal(comm_.rank(), token),
            uint64_t(round) * 4 + uint64_t(vote));
  last_visit_ = Clock::now();
  if (comm_.rank() == 0) beat();
}

bool TokenMail::is_stopped() {
  if (comm_.rank() != 0) return comm_.read_signal(*buffer_, stop_signal()) >= generation_;
  beat();
  for (int token = 0; token < tokens_; ++token) {
    uint64_t last = 0;
    for (int source = 0; source < ranks(); ++source)
      last = std::max(last, comm_.read_signal(*buffer_, vote_signal(source, token)));
    if (Vote(last % 4) == Vote::going) return false;
  }
  for (int peer = 1; peer < ranks(); ++peer)
    comm_.put(peer, *buffer_, 0, nullptr, 0, stop_signal(), generation_);
  return true;
}

void TokenMail::resume() {
  ++generation_;
  last_visit_ = Clock::now();
}

void TokenMail::beat() {
  constexpr double kBeats = 100;  // at most, in a deadline
  const auto now = Clock::now();
  if (std::chrono::duration<double>(now - last_beat_).count() < comm_.deadline() / kBeats) return;
  uint64_t votes = 0;
  for (int signal = vote_signal(0, 0); signal < stop_signal(); ++signal)
    votes += comm_.read_signal(*buffer_, signal);
  if (votes == votes_) return;
  votes_ = votes;
  last_beat_ = last_visit_ = now;
  ++beats_;
  for (int peer = 1; peer < ranks(); ++peer)
    comm_.put(peer, *buffer_, 0, nullptr, 0, beat_signal(), beats_);
}

void TokenMail::wait_a_moment() {
  constexpr auto kMoment = std::chrono::microseconds(50);
  comm_.wait(*buffer_, stop_signal(), 0, {"api-bcd token"});  // throws after an abort
  const auto now = Clock::now();
  if (const uint64_t beats = comm_.read_signal(*buffer_, beat_signal()); beats > beats_) {
    beats_ = beats;
    last_visit_ = now;
  }
  if (std::chrono::duration<double>(now - last_visit_).count() > comm_.deadline())
    throw Timeout({"visit of any token"}, comm_.rank(), 0, 0, comm_.deadline());
  std::this_thread::sleep_for(kMoment);
}

}  // namespace tandem::fit
