// Copies of snapshots in the memory of other ranks with the same parameters, on other hosts if
// there are several, so that a rank whose host is lost can be restored.
#pragma once

#include <cstdint>
#include <future>
#include <memory>
#include <vector>

#include "engine/checkpoint/snapshot/snapshot.h"
#include "engine/checkpoint/snapshot/snapshot_memory.h"
#include "tandem/communicator.h"

namespace tandem {

/// Distance, in the order of the ranks, from each rank to the one that has its copy: the least one
/// with which as many ranks as possible have it on another host. `hosts`: by rank; at least 2.
int peer_distance(std::span<const uint64_t> hosts);

class PeerCopies {
 public:
  /// `replicas`: at least 2 ranks with the same parameters; `memory`: with this rank's snapshots.
  /// Both must outlive this object. Collective over `replicas`.
  PeerCopies(Communicator& replicas, SnapshotMemory& memory);
  /// Waits for the copy that runs; after an exception at most 10 s.
  ~PeerCopies();
  PeerCopies(const PeerCopies&) = delete;
  PeerCopies& operator=(const PeerCopies&) = delete;

  /// Begins to send a generation of this rank's snapshots, which must not change until that ends,
  /// and to receive another rank's; all ranks begin with the same step. Not while one runs.
  void begin(const SnapshotGeneration& generation, int index);
  bool is_running() const;
  /// Waits for the copy. Throws what it has thrown.
  void end();

 private:
  void exchange(const SnapshotGeneration& generation, int index);

  SnapshotMemory& memory_;
  std::unique_ptr<Communicator> comm_;  // of the thread that copies
  int to_ = 0, from_ = 0;
  size_t max_bytes_ = 0;  // of a generation, of all ranks
  int newest_ = 0;        // generation of the other rank that was received last
  std::vector<std::byte> first_chunk_;
  std::future<void> running_;
};

}  // namespace tandem
