// Messages between logical clients and a server. Each rank has a contiguous range of the clients,
// rank 0 also the server. A message is a put from its sender's rank to its receiver's, counted even
// if they are the same, so the counts do not depend on the number of ranks.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "tandem/collectives.h"
#include "tandem/communicator.h"

namespace tandem::fit {

/// Number of the server among senders and receivers; clients count from 0.
constexpr int kServer = -1;

struct Message {
  int from = kServer, to = kServer;
  size_t bytes = 0;
};

class Channel {
 public:
  /// All ranks make one, in the same order of collective calls.
  Channel(Communicator& comm, int clients) : comm_(comm), clients_(clients) {}

  int clients() const { return clients_; }
  Shard local_clients() const { return shard_of(clients_, comm_.size(), comm_.rank()); }
  bool is_local(int node) const { return rank_of(node) == comm_.rank(); }
  bool has_server() const { return is_local(kServer); }

  /// Writes message `index` of a plan: its sender's rank is this one.
  using Write = std::function<void(size_t index, std::span<std::byte> message)>;
  /// Reads it, on its receiver's rank.
  using Read = std::function<void(size_t index, std::span<const std::byte> message)>;
  /// Collective. Delivers the messages of `plan`, which is the same on all ranks; each rank reads
  /// in the plan's order. Memory of messages is aligned for doubles. Throws Timeout after the
  /// communicator's deadline, and Aborted.
  void exchange(std::span<const Message> plan, const Write& write, const Read& read);

  /// Puts `message` to the rank of `to` (Communicator::put), and counts its bytes.
  void put(int to, SymmetricBuffer& buffer, size_t offset, std::span<const std::byte> message,
           int signal, uint64_t epoch) {
    comm_.put(rank_of(to), buffer, offset, message.data(), message.size(), signal, epoch);
    bytes_sent_ += int64_t(message.size());
  }

  /// Bytes of the messages that nodes of this rank have sent.
  int64_t bytes_sent() const { return bytes_sent_; }
  Communicator& communicator() const { return comm_; }

 private:
  int rank_of(int node) const;
  /// Offset of each message among those of its pair of ranks; makes room for the largest pair.
  std::vector<size_t> offsets(std::span<const Message> plan);
  /// Begin of what rank `source` sends in the current exchange.
  size_t slot(int source) const;

  Communicator& comm_;
  const int clients_;
  std::shared_ptr<SymmetricBuffer> buffer_;
  size_t capacity_ = 0;  // bytes from one rank to another in an exchange
  uint64_t epoch_ = 0;   // exchanges through buffer_
  int64_t bytes_sent_ = 0;
};

inline std::span<double> as_doubles(std::span<std::byte> message) {
  return {reinterpret_cast<double*>(message.data()), message.size() / sizeof(double)};
}
inline std::span<const double> as_doubles(std::span<const std::byte> message) {
  return {reinterpret_cast<const double*>(message.data()), message.size() / sizeof(double)};
}

}  // namespace tandem::fit
