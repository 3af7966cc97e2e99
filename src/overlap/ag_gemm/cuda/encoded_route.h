// Parameters of the copy warps of a fused AG+GEMM that send shards in a wire format: plain structs,
// passed by value.
#pragma once

#include "overlap/gather/cuda/shard_route.h"

namespace tandem::gpu {

/// Bytes of an encoded chunk of a row: codes, and a bf16 scale for each group.
constexpr int encoded_chunk_bytes(int bits, int group) {
  constexpr int kElements = kCopyItemBytes / 2;
  return kElements / 8 * bits + kElements / group * 2;
}

/// Buffers and signals of the local shard's rows on their way to the peers, and of the peers' rows
/// on their way to the tiles. A chunk of a row, kCopyItemBytes as bf16, is encoded as a unit
/// and stored at [source][chunk][row] of the receiver's inbox.
///
/// As a ShardRoute: `to` is this source's section of a target's inbox, and `arrived` counts there
/// the encoded rows of a chunk that have arrived.
struct EncodedShardRoute : ShardRoute {
  int rank = 0, size = 1;
  const std::byte* inbox = nullptr;    ///< in this rank's memory
  const uint64_t* received = nullptr;  ///< in this rank's memory: `arrived` by source and chunk
  std::byte* gathered = nullptr;       ///< rows of all sources, bf16
  uint64_t* decoded = nullptr;         ///< in this rank's memory: `arrived` of ShardArrivals
  float limit = 0;                     ///< as in WireParams
};

}  // namespace tandem::gpu
