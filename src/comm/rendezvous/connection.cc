#include "comm/rendezvous/connection.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <string_view>

namespace tandem::control {

Clock::time_point after(double seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(
                            std::chrono::duration<double>(std::clamp(seconds, 0.0, 1e9)));
}

Connection& Connection::operator=(Connection&& other) noexcept {
  if (this != &other) {
    close();
    fd_ = other.release();
  }
  return *this;
}

void Connection::close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

bool wait_until(int fd, short events, Clock::time_point until) {
  constexpr int64_t kLongest = 1'000'000;  // max milliseconds of one poll
  for (;;) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
    pollfd entry{fd, events, 0};
    const int ready = poll(&entry, 1, int(std::clamp<int64_t>(left, 0, kLongest)));
    if (ready > 0 || (ready < 0 && errno != EINTR)) return true;
    if (ready == 0 && left <= kLongest) return false;
  }
}

bool Channel::fill() {
  std::array<std::byte, 16384> buffer;
  while (!inbox_.front()) {
    const ssize_t got = recv(connection_.fd(), buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
    if (got == 0) return false;
    inbox_.append(std::span(buffer.data(), size_t(got)));
    if (inbox_.damaged()) return false;
  }
  return true;
}

Channel::Bytes Channel::serialize(const Header& header, std::string_view name,
                                  std::span<const std::byte> blob) {
  const auto head = std::as_bytes(std::span(&header, 1));
  const auto label = std::as_bytes(std::span(name.data(), name.size()));
  std::vector<std::byte> bytes;
  bytes.reserve(head.size() + label.size() + blob.size());
  for (const auto section : {head, label, blob})
    bytes.insert(bytes.end(), section.begin(), section.end());
  return std::make_shared<const std::vector<std::byte>>(std::move(bytes));
}

bool Channel::drain() {
  while (!out_.empty()) {
    const auto& bytes = *out_.front();
    const ssize_t sent = send(connection_.fd(), bytes.data() + sent_, bytes.size() - sent_,
                              MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
    sent_ += size_t(sent);
    sent_bytes_ += uint64_t(sent);
    if (sent_ < bytes.size()) continue;
    out_.pop_front();
    sent_ = 0;
  }
  return true;
}

}  // namespace tandem::control
