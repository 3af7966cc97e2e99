// What a fused kernel records of each output tile, and the timeline made of it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "observe/recorder.h"

namespace tandem {

/// Written by one thread of each role, a field at a time, during one call. Times are the low words
/// of the GPU's global timer (%globaltimer), in nanoseconds; both of a pair are zero where a tile
/// has no such span.
struct TileRecord {
  uint32_t waits, products, stores;  ///< how often each was begun in the call
  uint32_t processor;
  uint32_t wait_begin, wait_end;  ///< AG+GEMM: for the tile's shard; GEMM+RS: while it was sent
  uint32_t product_begin, product_end;
  uint32_t store_begin, store_end;  ///< into this rank's memory
  uint32_t held_begin, held_end;    ///< GEMM+RS: its longest wait for a peer, for parts under the
                                    ///< product or in the epilogue
};

/// The tiles of one call on one rank; the records lie by row, then column.
struct TileGrid {
  int rows = 0, columns = 0;  ///< columns: those that only fill up a cluster too
  int rank = 0, ranks = 1;
  int tiles() const { return rows * columns; }
  /// Whose rows a tile has: its source (AG+GEMM) or its owner (GEMM+RS).
  int shard_of(int tile) const { return tile / columns / (rows / ranks); }
};

/// The events of a call whose tiles wait for their shard. `base_ns`: the global timer shortly
/// before it. Throws InvalidArgument naming the first tile that was not recorded exactly once.
std::vector<SpanEvent> gather_spans(std::span<const TileRecord> records, const TileGrid& grid,
                                    uint64_t base_ns);
/// The same of a call whose tiles leave for their owner, beside the products, or add what has
/// landed where it is this rank.
std::vector<SpanEvent> scatter_spans(std::span<const TileRecord> records, const TileGrid& grid,
                                     uint64_t base_ns);

}  // namespace tandem
