// Transfer of an operator's bytes without its computation.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>

#include "collectives/symmetric_workspace.h"
#include "schedule/ring.h"
#include "tandem/communicator.h"

namespace tandem {

/// Wire time: each rank sends its share to every peer and waits for theirs.
class BareTransfer {
 public:
  BareTransfer(Communicator& comm, int64_t bytes)
      : each_(comm.size() > 1 ? size_t(bytes / (comm.size() - 1)) : 0),
        slot_(agreed(comm, each_)),
        source_(each_),
        workspace_(comm, "wire", slot_ * size_t(comm.size()), 0, comm.size()) {}
  void run() {
    const int rank = workspace_.comm().rank(), world = workspace_.comm().size();
    workspace_.begin();
    for (int step = 0; step + 1 < world; ++step) {
      workspace_.put(schedule::rs_owner(rank, world, step), size_t(rank) * slot_, source_.data(),
                     each_, rank);
    }
    for (int step = 0; step + 1 < world; ++step) {
      const int source = schedule::rs_source(rank, world, step);
      workspace_.await(source, source, 0);
    }
    workspace_.flush();
  }

 private:
  /// Max slot over the ranks, since uneven shards differ by a row.
  static size_t agreed(Communicator& comm, size_t bytes) {
    size_t maximum = bytes;
    for (const auto& blob : comm.exchange(std::as_bytes(std::span(&bytes, 1)), "wire bytes")) {
      size_t other;
      std::memcpy(&other, blob.data(), sizeof other);
      maximum = std::max(maximum, other);
    }
    return maximum + 64;
  }
  size_t each_, slot_;  // bytes per peer; slot that fits any rank's bytes
  Memory source_;
  OverlapWorkspace workspace_;
};

}  // namespace tandem
