// Snapshots that outlive the processes of a run: each rank's own, and the copy of another rank's.
//
// They are in memory that the launcher holds (comm/processes/shared/snapshot_memory_file.h), or of
// this process if it has passed none on. A run that resumes restores the newest step of which there
// is a verified snapshot of every rank, its own or the copy of it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/system/file_descriptor.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/run/trained_ranks.h"
#include "engine/checkpoint/snapshot/snapshot_area.h"
#include "engine/checkpoint/snapshot/snapshot_position.h"
#include "tandem/communicator.h"

namespace tandem {

class SnapshotMemory {
 public:
  /// Begins a start of the run, of which all ranks get the same number. `owner`: of this rank's
  /// snapshots. Collective.
  SnapshotMemory(Communicator& world, SnapshotOwner owner);

  /// Snapshots of all ranks, not verified, and the state of training at their step.
  struct Found {
    SnapshotPosition position;
    TrainState state;
  };
  /// Newest ones of this run and layout; nullopt if there are none. Collective.
  std::optional<Found> find(Communicator& world);
  /// Verifies the snapshots, after receiving those of ranks that have lost theirs, and restores the
  /// weights and optimizer states. Returns an empty string, or on every rank the reason why nothing
  /// was restored: damaged snapshots are not found again. Collective.
  std::string restore(const TrainedRanks& ranks, const SnapshotPosition& position);

  /// Makes the snapshots of this step and later ones in this rank's memory invalid.
  void erase(int64_t from_step);

  const SnapshotOwner& owner() const { return owner_; }
  uint64_t start() const { return start_; }
  SnapshotArea& local() { return local_; }
  /// Memory of the copy of another rank's snapshots.
  SnapshotArea& peer() { return peer_; }
  /// Generation in `local` that was restored; -1: none.
  int restored() const { return restored_; }
  /// Generation in `local` of the newest step of which all ranks' peers had copies in the last
  /// `find`, unless it is the found one; -1 if this rank has lost it. Nullopt, on every rank, if
  /// there is no such step.
  std::optional<int> copied() const;
  /// Warnings of all ranks since the last call, on rank 0.
  std::vector<std::string> take_warnings();

 private:
  std::optional<FileDescriptor> open_file(int rank);
  std::vector<FoundGeneration> list();
  void receive(Communicator& comm, const FoundGeneration& from);
  void send(Communicator& comm, const FoundGeneration& from);
  std::string verify(const TrainedRanks& ranks, int64_t step);

  SnapshotOwner owner_;
  std::string warning_;  // of this rank, for the next `find`
  std::optional<FileDescriptor> file_;
  SnapshotArea local_, peer_;
  uint64_t start_ = 0;
  int restored_ = -1;
  std::optional<SnapshotPosition> copied_;  // other than the one found last
  bool has_listed_ = false;
  std::vector<std::string> warnings_;
};

/// Newest step of which the memory of a launcher, `fd`, has a snapshot of each of so many ranks (0:
/// as many as rank 0's memory says), not verified; nullopt: none, or `fd` is -1.
std::optional<int64_t> newest_snapshot(int fd, int ranks);

/// "step 12 in the ranks' memory (rank 3: its copy on rank 1)"
std::string describe(const SnapshotPosition& position);

}  // namespace tandem
