#include "comm/processes/tcp/socket_transport.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <span>
#include <string>

#include "comm/message_fault.h"
#include "core/system/env.h"
#include "core/system/process/file_limit.h"
#include "tandem/error.h"

namespace tandem::processes {
namespace {

constexpr uint64_t kEventFd = ~uint64_t(0), kConnections = kEventFd - 1;
// Longest sleep while a connection is being made, and otherwise: strangers are dropped in time.
constexpr std::chrono::microseconds kConnectNap(1000), kListenNap(2000000);
constexpr size_t kMessagesAtOnce = 8;
// Number of received bytes that wakes the thread: few wake-ups, and data still in the cache.
constexpr size_t kLowWater = size_t(256) << 10;

bool would_block() {
  return errno == EAGAIN || errno == EWOULDBLOCK;
}

/// Hash of a put's contents, not 0.
uint64_t hash_contents(const Header& header, const std::byte* contents) {
  return std::max<uint64_t>(1, XXH3_64bits(contents, header.bytes));
}

/// Message without contents.
std::unique_ptr<Outgoing> make_notice(MessageKind kind) {
  auto message = std::make_unique<Outgoing>();
  message->header = {kind, 0, 0, 0, 0, 0, 0};
  seal(message->header);
  return message;
}

/// Flips the bit of a received header that a test asks for.
void flip_header_bit(Header& header) {
  const int64_t bit = header.kind == MessageKind::put ? take_header_bit(header.bytes) : -1;
  if (bit < 0) return;
  std::as_writable_bytes(std::span(&header, 1))[size_t(bit) / 8 % sizeof header] ^=
      std::byte(1u << bit % 8);
}

/// Copies the contents, which belong to the caller.
void flip_bit(Outgoing& message, uint64_t bit) {
  message.contents.assign(message.bytes(), message.bytes() + message.header.bytes);
  message.payload = nullptr;
  message.contents[bit / 8 % message.header.bytes] ^= std::byte(1u << bit % 8);
}

}  // namespace

SocketTransport::SocketTransport(std::unique_ptr<PeerConnections> connections, AddressOf address_of,
                                 TransportSink& sink, EventFd& event_fd)
    : epoll_(epoll_create1(EPOLL_CLOEXEC)),
      sink_(sink),
      event_fd_(event_fd),
      connections_(std::move(connections)),
      address_of_(std::move(address_of)) {
  if (!epoll_.open()) throw IoError(std::string("epoll: ") + describe_errno(errno));
  register_fd(event_fd_.descriptor(), EPOLLIN, kEventFd);
  if (connections_) register_fd(connections_->fd(), EPOLLIN, kConnections);
}

void SocketTransport::register_fd(int fd, uint32_t events, uint64_t what) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = what;
  if (epoll_ctl(epoll_.fd(), EPOLL_CTL_ADD, fd, &event) != 0) {
    throw IoError(std::string("epoll: ") + describe_errno(errno));
  }
}

void SocketTransport::send(int rank, std::unique_ptr<Outgoing> message) {
  const auto [entry, first] = peers_.try_emplace(rank);
  if (entry->second.lost || !connections_) {
    message->release();
    return;
  }
  if (first) connections_->call(rank, address_of_(rank));
  if (message->header.kind == MessageKind::put) {
    if (env().check_messages) {
      message->header.hash = hash_contents(message->header, message->bytes());
    }
    const int64_t bit = take_bit_to_flip(message->header.bytes);
    if (bit >= 0) flip_bit(*message, uint64_t(bit));
  }
  seal(message->header);
  entry->second.out.push_back(std::move(message));
}

void SocketTransport::connect_some() {
  for (auto& [rank, socket, why] : connections_->advance()) {
    Peer& peer = peers_[rank];
    if (peer.socket.open() || peer.lost) continue;
    if (!socket.open()) {
      lose(rank, peer);
      sink_.on_unreachable(rank, why);
      continue;
    }
    register_fd(socket.fd(), EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, uint64_t(rank));
    peer.socket = std::move(socket);
    peer.readable = peer.writable = true;
    if (leaving_) notify_leave();
  }
}

void SocketTransport::notify_leave() {
  leaving_ = true;
  for (auto& [rank, peer] : peers_) {
    if (peer.lost || std::exchange(peer.left, true)) continue;
    peer.out.push_back(make_notice(MessageKind::leave));
  }
}

bool SocketTransport::sending() const {
  return std::any_of(peers_.begin(), peers_.end(), [](const auto& each) {
    return !each.second.out.empty() || !each.second.zero_copy.empty();
  });
}

void SocketTransport::sleep(bool, std::chrono::microseconds longest) {
  if (connections_) {
    longest = std::min(longest, connections_->calling() ? kConnectNap : kListenNap);
  }
  std::array<epoll_event, 64> events;
  const auto time = std::chrono::ceil<std::chrono::milliseconds>(longest);
  const int count = epoll_wait(epoll_.fd(), events.data(), int(events.size()), int(time.count()));
  for (int i = 0; i < count; ++i) {
    const auto& event = events[size_t(i)];
    if (event.data.u64 == kEventFd) {
      event_fd_.clear();
      continue;
    }
    if (event.data.u64 == kConnections) continue;
    Peer& peer = peers_[int(event.data.u64)];
    peer.readable |= (event.events & ~uint32_t(EPOLLOUT)) != 0;
    peer.writable |= (event.events & ~uint32_t(EPOLLIN)) != 0;
  }
}

bool SocketTransport::progress() {
  bool moved = false;
  if (connections_) connect_some();
  for (auto& [rank, peer] : peers_) {
    moved |= drop_cancelled(peer);
    if (peer.socket.open() && peer.writable && !peer.out.empty()) moved |= write_some(rank, peer);
    if (peer.socket.open() && peer.readable) moved |= read_some(rank, peer);
  }
  return moved;
}

// Copies the rest of a partially sent message, so that the caller's memory is free. Zero-copy pages
// in flight may change: contents that arrive after an abort are not read.
bool SocketTransport::drop_cancelled(Peer& peer) {
  bool dropped = false;
  for (auto& message : peer.zero_copy) {
    if (!message->pending || !message->pending->cancelled) continue;
    message->release();
    dropped = true;
  }
  for (size_t i = peer.out.size(); i-- > 0;) {
    Outgoing& out = *peer.out[i];
    if (!out.pending || !out.pending->cancelled) continue;
    if (i == 0 && peer.sent > 0) {
      out.contents.assign(out.bytes(), out.bytes() + out.header.bytes);
      out.payload = nullptr;
      out.release();
    } else {
      out.release();
      peer.out.erase(peer.out.begin() + int64_t(i));
    }
    dropped = true;
  }
  if (dropped) sink_.on_sent();
  return dropped;
}

bool SocketTransport::write_some(int rank, Peer& peer) {
  bool moved = false;
  while (!peer.out.empty()) {
    const bool zero_copy = is_zero_copy(peer.out.front()->header) && peer.sent >= sizeof(Header);
    const int64_t bytes = zero_copy ? write_zero_copy(peer) : write_copied(peer);
    if (bytes <= 0) {
      peer.writable = false;
      if (bytes < 0) lose(rank, peer);
      return moved;
    }
    take_sent(peer, size_t(bytes));
    moved = true;
  }
  return moved;
}

// Writes up to and including the header of the first message whose contents are zero-copy.
int64_t SocketTransport::write_copied(Peer& peer) {
  std::array<iovec, 2 * kMessagesAtOnce> vectors;
  size_t count = 0;
  bool more = false;
  for (size_t i = 0; !more && i < std::min(kMessagesAtOnce, peer.out.size()); ++i) {
    Outgoing& out = *peer.out[i];
    const size_t skip = i == 0 ? peer.sent : 0;
    if (skip < sizeof(Header)) {
      vectors[count++] = {reinterpret_cast<std::byte*>(&out.header) + skip, sizeof(Header) - skip};
    }
    more = is_zero_copy(out.header);
    const size_t from = std::max(skip, sizeof(Header)) - sizeof(Header);
    if (!more && from < out.header.bytes) {
      vectors[count++] = {const_cast<std::byte*>(out.bytes()) + from, out.header.bytes - from};
    }
  }
  msghdr message{};
  message.msg_iov = vectors.data();
  message.msg_iovlen = count;
  const int flags = MSG_NOSIGNAL | MSG_DONTWAIT | (more ? MSG_MORE : 0);
  while (true) {
    const ssize_t bytes = sendmsg(peer.socket.fd(), &message, flags);
    if (bytes >= 0) return bytes;
    if (errno != EINTR) return would_block() ? 0 : -1;
  }
}

int64_t SocketTransport::write_zero_copy(Peer& peer) {
  const Outgoing& out = *peer.out.front();
  if (!peer.pipe) peer.pipe = std::make_unique<Pipe>();
  const size_t zero_copy = peer.sent - sizeof(Header) + peer.pipe->bytes();
  const size_t left = out.header.bytes - zero_copy;
  const size_t added = left > 0 ? peer.pipe->lend(out.bytes() + zero_copy, left) : 0;
  return peer.pipe->drain(peer.socket.fd(), added < left);
}

void SocketTransport::take_sent(Peer& peer, size_t bytes) {
  bool released = false;
  peer.sent += bytes;
  while (!peer.out.empty()) {
    auto& first = peer.out.front();
    const size_t whole = sizeof(Header) + first->header.bytes;
    if (peer.sent < whole) break;
    peer.sent -= whole;
    if (is_zero_copy(first->header)) {
      peer.zero_copy.push_back(std::move(first));
    } else {
      released |= first->pending != nullptr;
      first->release();
    }
    peer.out.pop_front();
  }
  if (released) sink_.on_sent();
}

void SocketTransport::take_back(Peer& peer) {
  if (peer.zero_copy.empty()) return;
  peer.zero_copy.front()->release();
  peer.zero_copy.pop_front();
  sink_.on_sent();
}

bool SocketTransport::read_some(int rank, Peer& peer) {
  bool moved = false;
  if (peer.early && !begin_contents(peer)) return false;
  while (peer.socket.open()) {
    if (peer.received >= sizeof(Header) && peer.received == sizeof(Header) + peer.header.bytes) {
      deliver(rank, peer);
    }
    std::byte* to = reinterpret_cast<std::byte*>(&peer.header) + peer.received;
    size_t want = sizeof(Header) - peer.received;
    if (peer.received >= sizeof(Header)) {
      const size_t at = peer.received - sizeof(Header);
      to = (peer.buffer ? peer.buffer->data + peer.header.offset : peer.contents.data()) + at;
      want = peer.header.bytes - at;
    }
    const ssize_t bytes = recv(peer.socket.fd(), to, want, MSG_DONTWAIT);
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes < 0 && would_block()) {
      peer.readable = false;
      set_low_water(peer);
      return moved;
    }
    if (bytes <= 0) {
      lose(rank, peer);
      return moved;
    }
    moved = true;
    peer.received += size_t(bytes);
    if (peer.received == sizeof(Header) && !(accepts(rank, peer) && begin_contents(peer))) {
      return moved;
    }
    if (peer.received == sizeof(Header) + peer.header.bytes) deliver(rank, peer);
  }
  return moved;
}

// False if the header is damaged: where its message ends is unknown.
bool SocketTransport::accepts(int rank, Peer& peer) {
  flip_header_bit(peer.header);
  if (is_sealed(peer.header)) return true;
  sink_.on_corrupt_header(rank);
  peer.leaving = true;  // the error is reported by its name
  lose(rank, peer);
  return false;
}

// False if nothing more can be read now.
bool SocketTransport::begin_contents(Peer& peer) {
  const bool put = peer.header.kind == MessageKind::put;
  peer.early = put && sink_.is_early(peer.header);
  if (peer.early) return false;
  if (put) peer.buffer = sink_.find_buffer(peer.header);
  if (!peer.buffer) peer.contents.resize(peer.header.bytes);
  return true;
}

void SocketTransport::deliver(int rank, Peer& peer) {
  peer.received = 0;
  const auto buffer = std::exchange(peer.buffer, nullptr);
  peer.contents.clear();
  if (peer.header.kind == MessageKind::put) {
    if (buffer) {
      const Header& header = peer.header;
      const bool is_corrupt =
          header.hash != 0 && header.hash != hash_contents(header, buffer->data + header.offset);
      is_corrupt ? sink_.on_corrupt(rank, header) : sink_.on_put(*buffer, header);
    }
    if (!is_zero_copy(peer.header)) return;
    // As early as possible; a partially sent message keeps its position.
    peer.out.insert(peer.out.begin() + (peer.sent > 0), make_notice(MessageKind::taken));
    return;
  }
  if (peer.header.kind == MessageKind::taken) return take_back(peer);
  peer.leaving |= peer.header.kind == MessageKind::leave;
}

void SocketTransport::set_low_water(Peer& peer) {
  const size_t left =
      peer.received < sizeof(Header) ? 1 : sizeof(Header) + peer.header.bytes - peer.received;
  const int bytes = int(std::min(left, kLowWater));
  if (bytes == peer.low_water) return;
  peer.low_water = bytes;
  setsockopt(peer.socket.fd(), SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof bytes);
}

void SocketTransport::lose(int rank, Peer& peer) {
  peer.socket.close();
  peer.lost = true;
  for (auto& message : peer.out) message->release();
  for (auto& message : peer.zero_copy) message->release();
  peer.out.clear();
  peer.zero_copy.clear();
  peer.pipe.reset();
  peer.sent = 0;
  sink_.on_sent();
  if (!peer.leaving) sink_.on_lost(rank);
}

void SocketTransport::close() {
  for (auto& [rank, peer] : peers_) peer.socket.close();
  connections_.reset();
}

}  // namespace tandem::processes
