// Messages between two ranks of a torch.distributed group, with tags. Any number may be in flight;
// a thread moves them, so that a pair that both send first, and messages concurrent with a
// collective, arrive.
//
// A rank has slots of chunks from every other one. A message is a sequence of chunks, the first
// with its header. A chunk is put once the receiver has freed its slot, so a short message has left
// before the receiver asks for it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "table.h"
#include "tandem/communicator.h"

namespace tandem::python {

class Messages {
 public:
  /// Collective.
  explicit Messages(std::shared_ptr<Communicator> comm);
  /// Ends messages that have not ended with kTandemAborted.
  ~Messages();
  Messages(const Messages&) = delete;
  Messages& operator=(const Messages&) = delete;

  /// Any thread. Throws InvalidArgument for a peer that is no other rank.
  void post(const TandemMessage& message);

 private:
  using Clock = std::chrono::steady_clock;
  struct Header {
    int64_t tag;
    uint64_t bytes;
  };
  struct Posted {
    TandemMessage message;
    Clock::time_point until;
    uint64_t at = 0;  ///< bytes sent
  };
  /// Message that has arrived before it was asked for.
  struct Stashed {
    Header header;
    std::vector<std::byte> data;
  };
  struct Incoming {
    Header header;
    std::optional<Posted> to;  ///< none: to the stash
    std::vector<std::byte> data;
    uint64_t at = 0;
    bool fits() const { return !to || to->message.bytes == header.bytes; }
  };
  struct Peer {
    std::deque<Posted> sends, receives;
    std::deque<Stashed> stash;
    std::optional<Incoming> incoming;
    uint64_t sent = 0, received = 0;  ///< chunks
  };

  void run();
  /// Returns true if a chunk has moved.
  bool advance();
  bool send_chunk(int rank, Peer& peer);
  bool receive_chunk(int rank, Peer& peer);
  bool take_stashed(int rank, Peer& peer);
  Incoming begin(Peer& peer, const Header& header);
  /// Removes the first receive from that peer, or else from any, with the tag.
  std::optional<Posted> take_receive(Peer& peer, int64_t tag);
  std::deque<Posted>& receives_or_sends(const TandemMessage& message);
  void finish(int rank, const Incoming& incoming) const;
  /// Throws Timeout, and Aborted if a rank that a message waits for has left or failed.
  void check_waits();
  void fail_all(const TandemError& error);
  bool is_idle() const;
  size_t slot_at(int rank, uint64_t chunk) const;
  int arrived(int rank) const { return rank; }
  int freed(int rank) const { return comm_->size() + rank; }
  int left(int rank) const { return 2 * comm_->size() + rank; }

  const std::shared_ptr<Communicator> comm_;
  const std::shared_ptr<SymmetricBuffer> buffer_;
  std::vector<Peer> peers_;      // of the thread
  std::deque<Posted> from_any_;  // of the thread
  std::mutex mutex_;             // of what follows
  std::condition_variable posted_;
  std::vector<Posted> new_;
  bool ends_ = false;
  std::thread thread_;
};

/// Writes the kind and the text of the exception in flight.
void describe_error(TandemError& error);

}  // namespace tandem::python
