// How the couriers of a fused AG+GEMM carry shards in a wire format: plain structs, passed by
// value.
#pragma once

#include "overlap/gather/cuda/shard_route.h"

namespace tandem::gpu {

/// Bytes of an encoded piece: codes, and a bf16 scale for each group.
constexpr int encoded_piece_bytes(int bits, int group) {
  constexpr int kElements = kCourierPieceBytes / 2;
  return kElements / 8 * bits + kElements / group * 2;
}

/// Of the local shard's rows to the others, and of theirs to where tiles read them. A chunk of a
/// row, kCourierPieceBytes as bf16, is a piece; encoded it lies at
/// [source][chunk][row] of the receiver's inbox.
///
/// As a ShardRoute: `to` is this source's part of a stop's inbox, and `arrived` counts there the
/// rows of a chunk that have come encoded.
struct EncodedShardRoute : ShardRoute {
  int rank = 0, size = 1;
  const std::byte* inbox = nullptr;    ///< here
  const uint64_t* received = nullptr;  ///< here: `arrived` of each source, of each of its chunks
  std::byte* gathered = nullptr;       ///< rows of all sources, bf16
  uint64_t* decoded = nullptr;         ///< here: ShardGate's `arrived`
  float limit = 0;                     ///< WireJob's
};

}  // namespace tandem::gpu
