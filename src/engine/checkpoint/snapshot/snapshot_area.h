// Memory of one rank's snapshots: a page that says whose they are, then the generations.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "comm/processes/shared/shared_memory.h"
#include "engine/checkpoint/snapshot/snapshot_header.h"

namespace tandem {

/// Max bytes of an area in a file.
constexpr uint64_t kAreaRange = uint64_t{1} << 39;

/// Owner of snapshots. They are restored only if all of it is the same.
struct SnapshotOwner {
  std::string run;     ///< id of the run, in OUT/run_id
  std::string layout;  ///< of its ranks, as in checkpoints
  int rank = 0, ranks = 1;
};

class SnapshotArea {
 public:
  /// `fd`: of a file with room at `offset`, which must outlive this object; -1: memory of this
  /// process, allocated by `reset`. Throws IoError.
  SnapshotArea(int fd, uint64_t offset);

  /// Whether it has an intact first page.
  bool has_owner() const;
  /// Rank whose snapshots these are. Only if it has an owner, as the next three.
  int rank() const;
  /// Number of ranks of its run.
  int ranks() const;
  const SnapshotShape& shape() const;
  /// Difference to `owner` for the user; empty if there is none.
  std::string differs(const SnapshotOwner& owner) const;

  /// Erases the area and makes it `owner`'s. Throws IoError.
  void reset(const SnapshotOwner& owner, const SnapshotShape& shape);
  /// Begin of a generation, `index` < shape().generations.
  std::byte* generation(int index) const;
  SnapshotHeader& header(int index) const {
    return *reinterpret_cast<SnapshotHeader*>(generation(index));
  }
  /// Index of the generation to write next: an invalid one or else the oldest, but none of
  /// `in_use`; -1 if there is none.
  int oldest(std::span<const int> in_use) const;
  size_t bytes() const;

 private:
  struct FirstPage;
  FirstPage* first_page() const;
  void map_generations();

  int fd_;
  uint64_t offset_;
  std::shared_ptr<processes::SharedMemory> page_, generations_;
};

}  // namespace tandem
