// Wire: messages between the processes of the MPI world, as the communication thread sees them.
// Every MPI call of a process is made here, by that one thread. Contents of one peer's puts become
// visible in the order they were sent, however MPI finishes them.
#pragma once

#include <mpi.h>

#include <atomic>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "comm/mpi/message.h"

namespace tandem::mpi {

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
  std::vector<std::byte> contents;  ///< owned contents: inline, or a large blob's
  const void* payload = nullptr;    ///< large contents, sent from where they are
  std::shared_ptr<PendingPuts> pending;
  std::vector<std::byte> message;
  MPI_Request requests[2] = {MPI_REQUEST_NULL, MPI_REQUEST_NULL};
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
};

class Wire {
 public:
  Wire(MPI_Comm comm, WireSink& sink);

  void send(int peer, std::unique_ptr<Outgoing> message, bool first);
  /// One look at everything under way. True when something moved.
  bool progress();
  bool sending() const;
  /// Withdraws the posted receives: only when nothing more can arrive.
  void close();

 private:
  struct Incoming {
    Header header;
    std::shared_ptr<LocalBuffer> buffer;
    std::vector<std::byte> contents;
    MPI_Request request = MPI_REQUEST_NULL;
    bool posted = false;
  };
  struct Peer {
    std::deque<std::unique_ptr<Outgoing>> waiting, started;
    std::deque<Incoming> incoming;
    int large_started = 0;
  };

  void post_header(size_t slot);
  bool start_sends(int rank, Peer& peer);
  bool finish_sends(Peer& peer);
  bool take_headers();
  void accept(int source, std::span<const std::byte> message);
  bool advance(int source, Peer& peer);
  bool post_payload(int source, const Peer& peer, size_t index, Incoming& entry);
  void deliver(int source, Incoming& entry);

  MPI_Comm comm_;
  WireSink& sink_;
  std::vector<Peer> peers_;
  std::vector<std::vector<std::byte>> slots_;
  std::vector<MPI_Request> slot_requests_;
  size_t next_slot_ = 0;
};

}  // namespace tandem::mpi
