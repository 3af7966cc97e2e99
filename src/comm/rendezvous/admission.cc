#include "comm/rendezvous/admission.h"

#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <thread>

#include "comm/rendezvous/endpoint.h"
#include "core/system/log.h"
#include "core/system/process/file_limit.h"
#include "tandem/error.h"

namespace tandem::control {
namespace {

constexpr double kPatienceSeconds = 10;
constexpr size_t kMaxStrangers = 256;
constexpr int kAtOnce = 64;
constexpr uint64_t kReported = 3;

bool out_of_descriptors(int error) {
  return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

}  // namespace

Admission::Admission(Connection listener, const Credentials& credentials, int size)
    : listener_(std::move(listener)),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      credentials_(credentials),
      size_(size),
      maximum_(kMaxStrangers + size_t(size)) {
  if (!epoll_.open() || !register_fd(listener_.fd(), nullptr)) {
    throw Error(fmt::format("epoll: {}", describe_errno(errno)));
  }
}

void Admission::close() {
  visitors_.clear();
  listener_.close();
  epoll_.close();
}

bool Admission::register_fd(int fd, Visitor* visitor) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.ptr = visitor;
  return epoll_ctl(epoll_.fd(), EPOLL_CTL_ADD, fd, &event) == 0;
}

std::vector<Admission::Entrant> Admission::serve(const Check& check) {
  using State = Incoming<Answer>::State;
  std::vector<Entrant> entrants;
  std::array<epoll_event, kAtOnce> events;
  drop_late();
  const int count = epoll_wait(epoll_.fd(), events.data(), kAtOnce, 0);
  bool more = false;
  for (int i = 0; i < count; ++i) {
    auto* visitor = static_cast<Visitor*>(events[size_t(i)].data.ptr);
    if (!visitor) {
      more = true;
      continue;
    }
    const int fd = visitor->connection.fd();
    const State state = visitor->caller.read(fd);
    if (state == State::waiting) continue;
    if (state == State::whole) {
      const Answer& answer = visitor->caller.answer();
      const bool proved = visitor->caller.proved(credentials_);
      const Verdict verdict = proved ? check(answer.rank, answer.size) : Verdict::unproved;
      visitor->caller.rule(fd, credentials_, verdict, size_);
      if (!proved) report(*visitor);
      epoll_ctl(epoll_.fd(), EPOLL_CTL_DEL, fd, nullptr);
      if (verdict == Verdict::admitted) {
        entrants.push_back({std::move(visitor->connection), answer.rank});
      }
    }
    visitors_.erase(visitor->self);
  }
  if (more) welcome_some();  // last: it may drop one of the peers above
  return entrants;
}

void Admission::welcome_some() {
  bool made_room = false;
  for (int i = 0; i < kAtOnce; ++i) {
    Connection connection(accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!connection.open()) {
      if (!out_of_descriptors(errno)) return;
      if (made_room) return;
      if (visitors_.empty()) {  // no pending peer to drop: the caller must not spin on it
        shortage_ = errno;
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        return;
      }
      visitors_.pop_front();
      made_room = true;
      continue;
    }
    if (is_another_users(connection)) continue;
    const int on = 1;
    setsockopt(connection.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (visitors_.size() == maximum_) visitors_.pop_front();
    Visitor& visitor = visitors_.emplace_back(std::move(connection), credentials_);
    visitor.until = after(kPatienceSeconds);
    visitor.self = std::prev(visitors_.end());
    if (!register_fd(visitor.connection.fd(), &visitor)) visitors_.pop_back();
  }
}

void Admission::drop_late() {
  const auto now = Clock::now();
  while (!visitors_.empty() && visitors_.front().until < now) visitors_.pop_front();
}

// Limits the log lines that a flood of strangers can cause.
void Admission::report(const Visitor& visitor) {
  if (++refused_ > kReported) return;
  const std::string& source = credentials_.source;
  const std::string why =
      !credentials_.secured() ? "it has a secret, this rank has neither TANDEM_SECRET nor "
                                "TANDEM_SECRET_FILE: expected the same on all ranks"
      : visitor.caller.answer().secured
          ? fmt::format("its secret is not that of {}, or it is of another world", source)
          : fmt::format("it has no secret, this rank has {}: expected the same on all ranks",
                        source);
  log_message(LogLevel::warn,
              fmt::format("refused a connection from {} as rank {}: {}{}",
                          peer_address(visitor.connection), visitor.caller.answer().rank, why,
                          refused_ == kReported ? " (later ones are refused silently)" : ""));
}

}  // namespace tandem::control
