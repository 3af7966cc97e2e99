// Wire: messages between the processes of the world, as the communication thread sees them; only
// that thread calls it. Contents of one peer's puts become visible in the order they were sent.
// Two kinds: sockets of our own (socket_wire.h), and MPI's messages (mpi_wire.h) for networks that
// MPI reaches by something better than TCP.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <vector>

#include "comm/processes/message.h"

namespace tandem::processes {

/// Puts of one communicator whose source is still needed.
struct PendingPuts {
  std::atomic<int64_t> count{0};
  std::atomic<bool> cancelled{false};  ///< those that have not started are dropped
};

/// This rank's memory of a symmetric buffer, kept alive while anything arrives in it.
struct LocalBuffer {
  std::byte* data = nullptr;
  uint64_t* signals = nullptr;
  std::shared_ptr<void> owner;
};

struct Outgoing {
  Header header;
  std::vector<std::byte> contents;  ///< owned contents: small ones, or a large blob's
  const void* payload = nullptr;    ///< large contents, sent from where they are
  std::shared_ptr<PendingPuts> pending;

  const std::byte* bytes() const {
    return payload ? static_cast<const std::byte*>(payload) : contents.data();
  }
  /// The source is no longer read.
  void release() {
    if (pending) --pending->count;
    pending.reset();
  }
};

/// What the wire does with messages that have arrived.
class WireSink {
 public:
  virtual ~WireSink() = default;
  /// Null when the buffer is gone: the contents are dropped.
  virtual std::shared_ptr<LocalBuffer> find_buffer(const Header& header) = 0;
  virtual void on_put(LocalBuffer& buffer, const Header& header) = 0;
  virtual void on_message(int source, const Header& header, std::vector<std::byte> contents) = 0;
  virtual void on_sent() = 0;
  /// The peer is gone without having said that it leaves.
  virtual void on_lost(int source) = 0;
};

class Wire {
 public:
  virtual ~Wire() = default;
  /// What the bytes cross, as benchmarks print it.
  virtual const char* name() const = 0;
  /// Longer contents are to be sent as several messages.
  virtual size_t piece_bytes() const = 0;
  /// `sleep` does not notice what arrives, only that time has passed or that it was woken.
  virtual bool polls() const = 0;
  virtual void send(int peer, std::unique_ptr<Outgoing> message, bool first) = 0;
  /// One look at everything under way. True when something moved.
  virtual bool progress() = 0;
  /// Sleeps until there is something to do, at most `longest`; `awaited`: the application waits
  /// for what arrives here.
  virtual void sleep(bool awaited, std::chrono::microseconds longest) = 0;
  virtual bool sending() const = 0;
  /// Only when nothing more can arrive.
  virtual void close() = 0;
};

}  // namespace tandem::processes
