// File without a name in which ranks of one host have memory that outlives their processes. Their
// launcher creates it, holds it open, and passes it on by TANDEM_SNAPSHOT_MEMORY; a later process
// with the number of a rank finds what the rank has left there.
#pragma once

#include <cstdint>
#include <optional>

#include "core/system/file_descriptor.h"

namespace tandem::processes {

constexpr const char* kSnapshotMemoryVariable = "TANDEM_SNAPSHOT_MEMORY";
/// Variable, 1 in ranks that only write the newest snapshot to disk; by tandem launch.
constexpr const char* kSnapshotToDiskVariable = "TANDEM_SNAPSHOT_TO_DISK";
/// Range of a rank in the file, from its number in the world times this; it has pages only where
/// they were written.
constexpr uint64_t kSnapshotRange = uint64_t{1} << 40;
constexpr int kMaxSnapshotRanks = 8192;

/// Creates the file, of constant size and closed on exec. -1 if the system has none, or limits the
/// size of files.
int create_snapshot_memory();

/// The file that the launcher has passed on, with the range of `rank` locked for this object's
/// lifetime; nullopt if there is none. Throws InvalidArgument, naming TANDEM_SNAPSHOT_MEMORY, for
/// another file; IoError if another process has the range.
std::optional<FileDescriptor> open_snapshot_memory(int rank);

}  // namespace tandem::processes
