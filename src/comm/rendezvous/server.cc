#include "comm/rendezvous/server.h"

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>

#include "comm/rendezvous/server_connection.h"

namespace tandem::control {

constexpr auto kGrace = std::chrono::seconds(3);

RendezvousServer::RendezvousServer(Connection local, Connection listener,
                                   const Credentials& credentials, int size)
    : size_(size),
      ranks_(size_t(size)),
      states_(size_t(size), State::absent),
      contributions_(size_t(size)) {
  if (listener.open()) admission_.emplace(std::move(listener), credentials, size);
  ranks_[0] = Channel(std::move(local));
  states_[0] = State::here;
  thread_ = std::thread([this] { serve(); });
}

RendezvousServer::~RendezvousServer() {
  if (!process_.is_this_process()) {
    thread_.detach();
    return;
  }
  ending_ = true;
  thread_.join();
}

void RendezvousServer::serve() {
  auto ending_since = Clock::time_point::max();
  for (;;) {
    const auto here = std::count(states_.begin(), states_.end(), State::here);
    const auto absent = std::count(states_.begin(), states_.end(), State::absent);
    if (ending_) {
      ending_since = std::min(ending_since, Clock::now());
      if (here == 0 || Clock::now() - ending_since > kGrace) return say_bye();
    }
    if (absent == 0) admission_.reset();
    std::vector<pollfd> waiting{{admission_ ? admission_->fd() : -1, POLLIN, 0}};
    for (int r = 0; r < size_; ++r) {
      const Channel& rank = ranks_[size_t(r)];
      const bool listens = states_[size_t(r)] == State::here;
      const int events = POLLIN | (rank.queued() ? POLLOUT : 0);
      waiting.push_back({listens ? rank.connection().fd() : -1, short(events), 0});
    }
    poll(waiting.data(), waiting.size(), 50);
    for (int r = 0; r < size_; ++r) {
      if (waiting[size_t(r) + 1].revents != 0 && states_[size_t(r)] == State::here) serve_rank(r);
    }
    if (admission_) let_in();  // also without events: silent pending peers are dropped
  }
}

void RendezvousServer::serve_rank(int rank) {
  Channel& channel = ranks_[size_t(rank)];
  const bool sent = channel.drain(), alive = channel.fill();
  Message message;
  while (states_[size_t(rank)] == State::here && channel.take(message)) handle(rank, message);
  if (states_[size_t(rank)] == State::here && (!sent || !alive)) lose(rank);
}

void RendezvousServer::let_in() {
  const auto check = [&](int rank, int size) {
    if (size != size_ || rank < 0 || rank >= size_) return Verdict::other_size;
    State& state = states_[size_t(rank)];
    if (state != State::absent) return Verdict::taken;
    state = State::here;
    return Verdict::admitted;
  };
  for (auto& [connection, rank] : admission_->serve(check)) {
    ranks_[size_t(rank)] = Channel(std::move(connection));
    if (failure_) send(rank, failure_);
  }
}

void RendezvousServer::handle(int rank, const Message& message) {
  switch (message.header.kind) {
    case Kind::blob:
      return collect(rank, message);
    case Kind::overdue: {
      int missing = 0;
      while (missing + 1 < size_ && contributions_[size_t(missing)].here) ++missing;
      const Header header{Kind::missing, missing, message.header.value, 0, 0};
      return send(rank, Channel::serialize(header, {}, {}));
    }
    case Kind::abort:
      return tell_all(rank, text_of(message));
    case Kind::bye:
      states_[size_t(rank)] = State::left;
      return;
    case Kind::all:
    case Kind::missing:
    case Kind::set:
    case Kind::get:
    case Kind::add:
    case Kind::watch:
    case Kind::meet:
    case Kind::reply:
    case Kind::event:
    case Kind::met:
      return lose(rank);
  }
}

void RendezvousServer::collect(int rank, const Message& message) {
  Contribution& contribution = contributions_[size_t(rank)];
  if (contribution.here || message.header.value != round_) return lose(rank);
  contribution = {message, true};
  if (!std::all_of(contributions_.begin(), contributions_.end(),
                   [](const Contribution& p) { return p.here; }))
    return;
  std::vector<std::byte> all;
  for (int from = 0; from < size_; ++from) {
    const Message& m = contributions_[size_t(from)].message;
    const Header header{Kind::all, from, round_, m.header.name_bytes, m.header.blob_bytes};
    const auto bytes = Channel::serialize(header, {}, m.payload);
    all.insert(all.end(), bytes->begin(), bytes->end());
  }
  const auto shared = std::make_shared<const std::vector<std::byte>>(std::move(all));
  for (int to = 0; to < size_; ++to) send(to, shared);
  ++round_;
  for (Contribution& p : contributions_) p = {};
}

// Bytes that a rank's socket does not accept at once stay queued; a disconnect shows in the next
// read.
void RendezvousServer::send(int rank, Channel::Bytes bytes) {
  if (states_[size_t(rank)] != State::here) return;
  ranks_[size_t(rank)].queue(std::move(bytes));
  ranks_[size_t(rank)].drain();
}

// Tells ranks that continue without rank 0 that its end is not a failure.
void RendezvousServer::say_bye() {
  if (!last_words_.empty()) return tell_all(0, last_words_);
  for (int r = 0; r < size_; ++r) send(r, Channel::serialize({Kind::bye, 0, 0, 0, 0}, {}, {}));
}

// Sends only the first failure: the others follow from it.
void RendezvousServer::tell_all(int origin, std::string_view reason) {
  if (failure_) return;
  const auto text = std::as_bytes(std::span(reason.data(), reason.size()));
  failure_ = Channel::serialize({Kind::abort, origin, 0, 0, uint32_t(text.size())}, {}, text);
  for (int r = 0; r < size_; ++r) send(r, failure_);
}

void RendezvousServer::lose(int rank) {
  states_[size_t(rank)] = State::left;
  ranks_[size_t(rank)] = Channel();
  tell_all(rank, fmt::format("rank {} ended without a word", rank));
}

}  // namespace tandem::control
