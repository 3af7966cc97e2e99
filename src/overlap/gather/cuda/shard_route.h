// How the shards of a gather come to a kernel that reads them as they arrive, and how its own warps
// carry them, where not the copy engine does: plain structs, passed by value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "comm/device/device_signal.h"

namespace tandem::gpu {

/// What a reader waits for. Rows are cut into chunks of columns, and each chunk of a source has a
/// signal, to which each call adds counts_per_chunk: by couriers one for each of its rows, by the
/// copy engine 1. It is here once that has reached (*epoch + ahead) * counts_per_chunk.
struct ShardGate {
  const uint64_t* arrived = nullptr;  ///< of each source, of each of its chunks
  int chunks = 1;                     ///< of a source
  int chunk_bytes = std::numeric_limits<int>::max();
  const uint64_t* epoch = nullptr;
  unsigned ahead = 0, counts_per_chunk = 1;
  Watch watch;
};

/// Of a row, in a chunk, where a kernel's couriers carry the shards
/// (overlap/gather/cuda/shard_courier.cuh).
constexpr int kCourierPieceBytes = 2048;

/// Where a kernel's couriers carry the local shard's rows. Stops are in the order of delivery: who
/// needs them first, first; this rank itself, last, where the gather keeps its own rows. Each row
/// of a chunk counts one in the stop's signal, so that ranks may share the work among any number of
/// blocks.
struct ShardRoute {
  int stops = 0;         ///< 0: there are no couriers
  int bytes_per_ns = 1;  ///< that all blocks together send at most
  int groups = 1;        ///< of blocks (schedule::AgCourierOrder)
  /// The first stop gets all chunks before the others get any, for tiles that need it first.
  bool first_alone = false;
  const std::byte* from = nullptr;
  int rows = 0, row_bytes = 0, chunks = 0;
  std::byte* to[kMaxGpus] = {};
  /// One of each row, or none; they arrive before the row's first chunk, `scales_at` bytes behind
  /// `to`.
  const float* scales = nullptr;
  ptrdiff_t scales_at = 0;
  uint64_t* arrived[kMaxGpus] = {};        ///< there: of this source's chunks
  uint64_t* enter[kMaxGpus] = {};          ///< there: this rank has entered
  const uint64_t* entered[kMaxGpus] = {};  ///< here: the stop has
  int rank_of[kMaxGpus] = {};
  CallCounter* calls = nullptr;  ///< a reader is a warp
  Watch watch;
};

}  // namespace tandem::gpu
