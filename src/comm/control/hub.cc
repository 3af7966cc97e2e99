#include "comm/control/hub.h"

#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <algorithm>
#include <chrono>

namespace tandem::control {

using Clock = std::chrono::steady_clock;

constexpr auto kGrace = std::chrono::seconds(3);

Hub::Hub(Connection listener, int size)
    : listener_(std::move(listener)),
      size_(size),
      ranks_(size_t(size)),
      states_(size_t(size), State::absent),
      parts_(size_t(size)),
      thread_([this] { serve(); }) {}

Hub::~Hub() {
  ending_ = true;
  thread_.join();
}

void Hub::serve() {
  auto ending_since = Clock::time_point::max();
  for (;;) {
    const auto here = std::count(states_.begin(), states_.end(), State::here);
    if (ending_) {
      ending_since = std::min(ending_since, Clock::now());
      if (here == 0 || Clock::now() - ending_since > kGrace) return say_bye();
    }
    std::vector<pollfd> waiting{{listener_.fd(), POLLIN, 0}};
    std::vector<int> whose{-1};
    for (int r = 0; r < size_; ++r) {
      if (states_[size_t(r)] != State::here) continue;
      waiting.push_back({ranks_[size_t(r)].fd(), POLLIN, 0});
      whose.push_back(r);
    }
    if (poll(waiting.data(), waiting.size(), 50) <= 0) continue;
    for (size_t i = 0; i < waiting.size(); ++i) {
      if (waiting[i].revents == 0) continue;
      if (i == 0) {
        accept_one();
        continue;
      }
      const int rank = whose[i];
      Message message;
      if (ranks_[size_t(rank)].receive(message, 1) == Connection::Received::message) {
        handle(rank, message);
      } else {
        lose(rank);
      }
    }
  }
}

void Hub::accept_one() {
  Connection connection(accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC));
  const int on = 1;
  setsockopt(connection.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  const timeval limit{5, 0};  // a rank that stops halfway must not stop the others
  setsockopt(connection.fd(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  setsockopt(connection.fd(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  Message hello;
  if (!connection.open() || connection.receive(hello, 1) != Connection::Received::message ||
      hello.header.kind != Kind::hello || hello.header.rank < 0 || hello.header.rank >= size_) {
    return;
  }
  const auto rank = size_t(hello.header.rank);
  if (states_[rank] != State::absent || hello.header.value != uint64_t(size_)) {
    const std::string reason =
        hello.header.value != uint64_t(size_)
            ? fmt::format("rank {} says {} ranks, rank 0 says {}", rank, hello.header.value, size_)
            : fmt::format("rank {} came twice", rank);
    const Header header{Kind::abort, int32_t(rank), 0, 0, uint32_t(reason.size())};
    connection.send(header, nullptr, reason.data());
    return;
  }
  ranks_[rank] = std::move(connection);
  states_[rank] = State::here;
  if (failed_) ranks_[rank].send(failure_, nullptr, failure_reason_.data());
}

void Hub::handle(int rank, const Message& message) {
  switch (message.header.kind) {
    case Kind::blob:
      return collect(rank, message);
    case Kind::overdue: {
      int missing = 0;
      while (missing + 1 < size_ && parts_[size_t(missing)].here) ++missing;
      ranks_[size_t(rank)].send({Kind::missing, missing, message.header.value, 0, 0}, nullptr,
                                nullptr);
      return;
    }
    case Kind::abort:
      return tell_all(message.header,
                      std::string(reinterpret_cast<const char*>(message.payload.data()),
                                  message.payload.size()));
    case Kind::bye:
      states_[size_t(rank)] = State::left;
      return;
    case Kind::hello:
    case Kind::all:
    case Kind::missing:
      return lose(rank);
  }
}

void Hub::collect(int rank, const Message& message) {
  Part& part = parts_[size_t(rank)];
  if (part.here || message.header.value != round_) return lose(rank);
  part = {message, true};
  if (!std::all_of(parts_.begin(), parts_.end(), [](const Part& p) { return p.here; })) return;
  for (const Connection& to : ranks_) {
    for (int from = 0; from < size_; ++from) {
      const Message& m = parts_[size_t(from)].message;
      to.send({Kind::all, from, round_, m.header.name_bytes, m.header.blob_bytes}, m.payload.data(),
              m.payload.data() + m.header.name_bytes);
    }
  }
  ++round_;
  for (Part& p : parts_) p = {};
}

// Ranks that have more to do alone must not take the end of rank 0 for a failure.
void Hub::say_bye() {
  for (size_t r = 0; r < ranks_.size(); ++r) {
    if (states_[r] == State::here) ranks_[r].send({Kind::bye, 0, 0, 0, 0}, nullptr, nullptr);
  }
}

// Only the first failure is told: the rest follow from it.
void Hub::tell_all(const Header& header, const std::string& reason) {
  if (failed_) return;
  failed_ = true;
  failure_ = {Kind::abort, header.rank, 0, 0, uint32_t(reason.size())};
  failure_reason_ = reason;
  for (size_t r = 0; r < ranks_.size(); ++r) {
    if (states_[r] == State::here) ranks_[r].send(failure_, nullptr, reason.data());
  }
}

void Hub::lose(int rank) {
  states_[size_t(rank)] = State::left;
  tell_all({Kind::abort, rank, 0, 0, 0}, fmt::format("rank {} ended without a word", rank));
}

}  // namespace tandem::control
