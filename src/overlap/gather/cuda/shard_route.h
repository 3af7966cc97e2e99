// Arrival flags of a gather's shards for a kernel that reads them as they arrive, and parameters of
// its copy warps if the copy engine does not transfer them: plain structs, passed by value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "comm/device/device_signal.h"

namespace tandem::gpu {

/// Arrival flags that a reader waits for. Rows are split into chunks of columns, and each chunk of
/// a source has a signal, to which each call adds counts_per_chunk: copy warps one for each of its
/// rows, the copy engine 1. The chunk has arrived once the signal reaches (*epoch + ahead) *
/// counts_per_chunk.
struct ShardArrivals {
  const uint64_t* arrived = nullptr;  ///< by source and chunk
  int chunks = 1;                     ///< per source
  int chunk_bytes = std::numeric_limits<int>::max();
  const uint64_t* epoch = nullptr;
  unsigned ahead = 0, counts_per_chunk = 1;
  Deadline deadline;
};

/// Bytes of a row in a chunk, if a kernel's copy warps send the shards
/// (overlap/gather/cuda/shard_copy_warp.cuh).
constexpr int kCopyItemBytes = 2048;

/// Route of the local shard's rows by a kernel's copy warps. Targets are in order of
/// delivery: those that need the rows first come first; this rank itself, last, if the gather keeps
/// its local rows. Each row of a chunk adds one to the target's signal, so that ranks may share the
/// work among any number of blocks.
struct ShardRoute {
  int targets = 0;       ///< number of targets; 0: no copy warps
  int bytes_per_ns = 1;  ///< max rate of all blocks together
  int groups = 1;        ///< groups of blocks (schedule::AgCopyOrder)
  /// Sends all chunks to the first target before any to the others, for tiles that need it first.
  bool first_alone = false;
  const std::byte* from = nullptr;
  int rows = 0, row_bytes = 0, chunks = 0;
  std::byte* to[kMaxGpus] = {};
  /// One per row, or null; they arrive before the row's first chunk, at `to` + `scales_at` bytes.
  const float* scales = nullptr;
  ptrdiff_t scales_at = 0;
  uint64_t* arrived[kMaxGpus] = {};            ///< in the target's memory: of this source's chunks
  uint64_t* enter[kMaxGpus] = {};              ///< in the target's memory: ready flag of this rank
  const uint64_t* ready_flags[kMaxGpus] = {};  ///< in this rank's memory: ready flag of the target
  int rank_of[kMaxGpus] = {};
  CallCounter* calls = nullptr;  ///< counts one reader per warp
  Deadline deadline;
};

}  // namespace tandem::gpu
