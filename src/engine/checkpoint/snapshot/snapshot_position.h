// Choice of the step that all ranks restore from snapshots in memory.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace tandem {

/// A valid generation in a rank's memory.
struct FoundGeneration {
  int32_t holder = 0, owner = 0;  ///< equal in a rank's own memory
  int32_t index = 0;              ///< in the holder's area of snapshots, its own or its peer's
  int64_t step = 0;
  uint64_t start = 0;  ///< SnapshotHeader::start
  bool operator==(const FoundGeneration&) const = default;
};

struct SnapshotPosition {
  int64_t step = 0;
  uint64_t start = 0;
  std::vector<FoundGeneration> sources;  ///< by rank: its own generation, or else its peer's copy
};

/// Newest step of one start of which there is a generation of every rank; nullopt if there is none.
std::optional<SnapshotPosition> newest_common(std::span<const FoundGeneration> all, int ranks);

}  // namespace tandem
