#include "comm/rendezvous/server_connection.h"

#include <poll.h>

#include <string>

namespace tandem::control {

std::string_view text_of(const Message& message) {
  return {reinterpret_cast<const char*>(message.payload.data()), message.payload.size()};
}

bool ServerConnection::send(double seconds, const Header& header, std::string_view name,
                            std::span<const std::byte> blob) {
  const auto until = after(seconds);
  const std::lock_guard lock(sending_);
  if (stuck_ || channel_.queued()) return !stuck_;
  channel_.queue(Channel::serialize(header, name, blob));
  while (channel_.drain() && channel_.queued()) {
    stuck_ = !wait_until(connection().fd(), POLLOUT, until);
    if (stuck_) return false;
  }
  return true;
}

ServerConnection::Received ServerConnection::receive_now(Message& message) {
  if (aborted_) throw Aborted(*aborted_);
  if (ended_) return Received::gone;
  const bool alive = channel_.fill();
  if (!channel_.take(message)) return alive ? Received::timeout : Received::gone;
  if (message.header.kind == Kind::abort) {
    throw Aborted(aborted_.emplace(message.header.rank, std::string(text_of(message))));
  }
  ended_ = message.header.kind == Kind::bye;
  return ended_ ? Received::gone : Received::message;
}

ServerConnection::Received ServerConnection::receive(Message& message, double seconds) {
  const auto until = after(seconds);
  for (;;) {
    {
      const std::lock_guard lock(receiving_);
      const auto received = receive_now(message);
      if (received != Received::timeout) return received;
    }
    if (!wait_until(connection().fd(), POLLIN, until)) return Received::timeout;
  }
}

void ServerConnection::look_for_abort() {
  const std::lock_guard lock(receiving_);
  if (aborted_) throw Aborted(*aborted_);
  if (ended_) return;
  const bool alive = channel_.fill();
  const Header* next = channel_.front();
  if (!next) {
    if (!alive) throw Aborted(aborted_.emplace(0, kServerGone));
    return;
  }
  Message message;
  if (next->kind == Kind::abort || next->kind == Kind::bye) receive_now(message);
}

}  // namespace tandem::control
