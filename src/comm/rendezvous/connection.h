// Owned non-blocking socket, and the channel that exchanges messages over it.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "comm/rendezvous/message.h"

namespace tandem::control {

using Clock = std::chrono::steady_clock;

/// Time point `seconds` from now, clamped to the clock's range.
Clock::time_point after(double seconds);

class Connection {
 public:
  Connection() = default;
  explicit Connection(int fd) : fd_(fd) {}
  ~Connection() { close(); }
  Connection(Connection&& other) noexcept : fd_(other.release()) {}
  Connection& operator=(Connection&& other) noexcept;
  int fd() const { return fd_; }
  bool open() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }
  void close();

 private:
  int fd_ = -1;
};

/// Waits until `fd` is readable or writable (POLLIN, POLLOUT) or has ended; false after `until`.
bool wait_until(int fd, short events, Clock::time_point until);

/// Messages in both directions. One thread may read while another writes. Never raises SIGPIPE.
class Channel {
 public:
  Channel() = default;
  explicit Channel(Connection connection) : connection_(std::move(connection)) {}

  const Connection& connection() const { return connection_; }
  /// Reads what has arrived, but stops once a message is complete. False if the peer has
  /// disconnected or has sent an invalid message.
  bool fill();
  const Header* front() const { return inbox_.front(); }
  bool take(Message& message) { return inbox_.take(message); }

  using Bytes = std::shared_ptr<const std::vector<std::byte>>;
  static Bytes serialize(const Header& header, std::string_view name,
                         std::span<const std::byte> blob);
  void queue(Bytes bytes) { out_.push_back(std::move(bytes)); }
  /// Sends as many of the queued bytes as the system accepts. False if the peer has disconnected.
  bool drain();
  bool queued() const { return !out_.empty(); }
  /// Bytes that the system has accepted so far.
  uint64_t sent_bytes() const { return sent_bytes_; }

 private:
  Connection connection_;
  Inbox inbox_;
  std::deque<Bytes> out_;
  size_t sent_ = 0;  // bytes of the first message
  uint64_t sent_bytes_ = 0;
};

}  // namespace tandem::control
