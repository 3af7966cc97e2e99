#include "comm/rendezvous/store_server.h"

#include <fmt/format.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>

#include "core/system/process/file_limit.h"
#include "tandem/error.h"

namespace tandem::control {
namespace {

constexpr uint64_t kAdmission = ~uint64_t{0}, kStop = kAdmission - 1;
// Time for clients to leave; more while the world is formed, as ranks start at different times.
constexpr auto kStoreGrace = std::chrono::seconds(1), kStartGrace = std::chrono::seconds(3);
constexpr int kTickMs = 500, kLastTickMs = 20;

}  // namespace

StoreServer::StoreServer(Connection listener, const Credentials& credentials, int size)
    : epoll_(epoll_create1(EPOLL_CLOEXEC)),
      stop_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      admission_(std::move(listener), credentials, size),
      clients_(size_t(size)),
      state_(size, [this](int rank, const Channel::Bytes& bytes) { send(rank, bytes); }) {
  raise_file_limit();
  if (!epoll_.open() || !stop_.open() ||
      !watch_fd(EPOLL_CTL_ADD, admission_.fd(), EPOLLIN, kAdmission) ||
      !watch_fd(EPOLL_CTL_ADD, stop_.fd(), EPOLLIN, kStop)) {
    throw IoError(fmt::format("store: epoll: {}", describe_errno(errno)));
  }
  thread_ = std::thread([this] { serve(); });
}

StoreServer::~StoreServer() {
  if (!process_.is_this_process()) {
    thread_.detach();
    return;
  }
  ending_ = true;
  const uint64_t one = 1;
  while (::write(stop_.fd(), &one, sizeof one) < 0 && errno == EINTR) {
  }
  thread_.join();
}

bool StoreServer::watch_fd(int operation, int fd, uint32_t events, uint64_t what) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = what;
  return epoll_ctl(epoll_.fd(), operation, fd, &event) == 0;
}

void StoreServer::serve() {
  std::array<epoll_event, 256> events;
  auto ending_since = Clock::time_point::max(), ticked = Clock::now();
  for (;;) {
    if (ending_) {
      ending_since = std::min(ending_since, Clock::now());
      const bool all_joined = joined_ == int(clients_.size());
      const bool awaits_late = !all_joined && !last_words_.empty();
      const auto grace = all_joined ? kStoreGrace : kStartGrace;
      if ((here_ == 0 && !awaits_late) || Clock::now() - ending_since > grace) break;
    }
    const int tick = ending_ ? kLastTickMs : kTickMs;
    const int count = epoll_wait(epoll_.fd(), events.data(), int(events.size()), tick);
    bool strangers = false;
    for (int i = 0; i < count; ++i) {
      const uint64_t what = events[size_t(i)].data.u64;
      if (what == kAdmission) {
        strangers = true;
      } else if (what == kStop) {
        watch_fd(EPOLL_CTL_DEL, stop_.fd(), 0, 0);
      } else {
        serve_client(int(what));
      }
    }
    const auto now = Clock::now();
    const bool tick_is_due = now - ticked > std::chrono::milliseconds(kTickMs);
    // Also without events: silent peers are dropped.
    if (joined_ < int(clients_.size()) && (strangers || tick_is_due)) let_in();
    if (tick_is_due) {
      state_.expire(now);
      ticked = now;
    }
    if (admission_.shortage() != 0 && !reported_) report_shortage();
    state_.send_events();
  }
  if (last_words_.empty()) return;
  report_failure(origin_, last_words_);
  state_.send_events();
}

// The ranks that wait for the one that cannot be let in learn why it does not come.
void StoreServer::report_shortage() {
  reported_ = true;
  report_failure(0, fmt::format("the rendezvous store cannot accept a rank: {} (ulimit -n says how "
                                "many files a process may have open)",
                                describe_errno(admission_.shortage())));
}

// Sets the key that a rank sets if it fails while the world is formed.
void StoreServer::report_failure(int origin, std::string_view reason) {
  const std::string_view key = kStartFailure;
  const Blob value = make_abort_value(origin, reason);
  Message message{{Kind::set, 0, 0, uint32_t(key.size()), uint32_t(value.size())}, {}};
  for (const auto bytes : {bytes_of(key), std::span<const std::byte>(value)}) {
    message.payload.insert(message.payload.end(), bytes.begin(), bytes.end());
  }
  state_.handle(0, message, Clock::now());
}

void StoreServer::let_in() {
  const auto check = [&](int rank, int size) {
    if (size != int(clients_.size()) || rank < 0 || rank >= size) return Verdict::other_size;
    State& state = clients_[size_t(rank)].state;
    if (state != State::absent) return Verdict::taken;
    state = State::here;
    ++here_;
    ++joined_;
    return Verdict::admitted;
  };
  for (auto& [connection, rank] : admission_.serve(check)) {
    Client& client = clients_[size_t(rank)];
    client.channel = Channel(std::move(connection));
    if (!watch_fd(EPOLL_CTL_ADD, client.channel.connection().fd(), EPOLLIN, uint64_t(rank))) {
      end_client(rank, true);
    }
  }
  if (joined_ == int(clients_.size())) admission_.close();
}

void StoreServer::serve_client(int rank) {
  Client& client = clients_[size_t(rank)];
  if (client.state != State::here) return;
  const bool alive = client.channel.fill();
  Message message;
  while (client.state == State::here && client.channel.take(message)) {
    if (message.header.kind == Kind::bye) return end_client(rank, false);
    if (!state_.handle(rank, message, Clock::now())) return end_client(rank, true);
  }
  if (client.state == State::here && !alive) return end_client(rank, true);
  if (client.state == State::here && client.wants_to_write) write(rank);
}

// Bytes that a client's socket does not accept at once stay queued. A broken connection shows in
// the next read.
void StoreServer::send(int rank, const Channel::Bytes& bytes) {
  Client& client = clients_[size_t(rank)];
  if (client.state != State::here) return;
  client.channel.queue(bytes);
  if (!client.wants_to_write) write(rank);
}

void StoreServer::write(int rank) {
  Client& client = clients_[size_t(rank)];
  if (!client.channel.drain()) return;
  const bool wants = client.channel.queued();
  if (wants == client.wants_to_write) return;
  client.wants_to_write = wants;
  watch_fd(EPOLL_CTL_MOD, client.channel.connection().fd(),
           EPOLLIN | (wants ? uint32_t(EPOLLOUT) : 0u), uint64_t(rank));
}

void StoreServer::end_client(int rank, bool lost) {
  Client& client = clients_[size_t(rank)];
  client.state = State::gone;
  client.channel = Channel();
  --here_;
  state_.remove_client(rank, lost);
}

}  // namespace tandem::control
