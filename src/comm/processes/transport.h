// Message transport between the processes of the world; only the communication thread calls it.
// Contents of one peer's puts become visible in the order they were sent. Two kinds: sockets
// (socket_transport.h), and MPI messages (mpi_transport.h) for networks that MPI reaches by
// something better than TCP.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "comm/processes/message.h"

namespace tandem::processes {

/// Puts of one communicator whose source is still needed.
struct PendingPuts {
  std::atomic<int64_t> count{0};
  std::atomic<bool> cancelled{false};  ///< puts that have not started are dropped
};

/// This rank's memory of a symmetric buffer, kept alive while data arrives in it.
struct LocalBuffer {
  std::byte* data = nullptr;
  uint64_t* signals = nullptr;
  std::shared_ptr<void> owner;
};

struct Outgoing {
  Header header;
  std::vector<std::byte> contents;  ///< owned contents: small ones, or a large blob's
  const void* payload = nullptr;    ///< large contents, sent in place
  std::shared_ptr<PendingPuts> pending;

  const std::byte* bytes() const {
    return payload ? static_cast<const std::byte*>(payload) : contents.data();
  }
  /// Marks the source as no longer read.
  void release() {
    if (pending) --pending->count;
    pending.reset();
  }
};

/// Receiver of the transport's arrived messages.
class TransportSink {
 public:
  virtual ~TransportSink() = default;
  /// Null if the buffer was destroyed: the contents are dropped.
  virtual std::shared_ptr<LocalBuffer> find_buffer(const Header& header) = 0;
  /// Whether this rank has not made the buffer yet: the contents must wait.
  virtual bool is_early(const Header& header) = 0;
  virtual void on_put(LocalBuffer& buffer, const Header& header) = 0;
  virtual void on_sent() = 0;
  /// Called instead of `on_put` for a message whose hash differs from the sender's.
  virtual void on_corrupt(int source, const Header& header) = 0;
  /// Called for a header that was damaged on its way: no more is received from `source`.
  virtual void on_corrupt_header(int source) = 0;
  /// Called if a peer disconnects without announcing that it leaves.
  virtual void on_lost(int source) = 0;
  virtual void on_unreachable(int peer, const std::string& why) = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;
  /// Name of the network that the bytes cross, as benchmarks print it.
  virtual const char* name() const = 0;
  /// Max size of a message; longer contents are sent as several.
  virtual size_t chunk_bytes() const = 0;
  /// Whether `sleep` does not notice arrivals, only elapsed time or a wake-up.
  virtual bool polls() const = 0;
  virtual void send(int peer, std::unique_ptr<Outgoing> message) = 0;
  /// Advances all pending work once. True if anything moved.
  virtual bool progress() = 0;
  /// Sleeps until there is work, at most `longest`; `awaited`: the application waits for an
  /// arrival.
  virtual void sleep(bool awaited, std::chrono::microseconds longest) = 0;
  virtual bool sending() const = 0;
  /// Tells the peers that this rank leaves, so the end of a connection is no loss.
  virtual void notify_leave() {}
  /// Called only when nothing more can arrive.
  virtual void close() = 0;
};

}  // namespace tandem::processes
