// Per-tile records of a fused kernel, and the timeline built from them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "observe/recorder.h"

namespace tandem {

/// Written by one thread of each warp role, a field at a time, during one call. Times are the low
/// words of the GPU's global timer (%globaltimer), in nanoseconds; both of a pair are zero if a
/// tile has no such span.
struct TileRecord {
  uint32_t waits, products, stores;  ///< number of begins in the call
  uint32_t processor;
  uint32_t wait_begin, wait_end;  ///< AG+GEMM: wait for the tile's shard; GEMM+RS: time of its send
  uint32_t product_begin, product_end;
  uint32_t store_begin, store_end;      ///< stores to this rank's memory
  uint32_t stalled_begin, stalled_end;  ///< GEMM+RS: longest wait for a peer's partial sums, in the
                                        ///< main loop or in the epilogue
};

/// Tiles of one call on one rank; records are ordered by row, then column.
struct TileGrid {
  int rows = 0, columns = 0;  ///< columns: includes those that only pad a cluster
  int rank = 0, ranks = 1;
  int tiles() const { return rows * columns; }
  /// Shard of a tile's rows: its source (AG+GEMM) or its owner (GEMM+RS).
  int shard_of(int tile) const { return tile / columns / (rows / ranks); }
};

/// Events of an AG+GEMM call, whose tiles wait for their shard. `base_ns`: the global timer shortly
/// before the call. Throws InvalidArgument, which names the first tile not recorded exactly once.
std::vector<SpanEvent> gather_spans(std::span<const TileRecord> records, const TileGrid& grid,
                                    uint64_t base_ns);
/// Same for a GEMM+RS call, whose tiles are sent to their owner, overlapped with the GEMM, or, if
/// that is this rank, add the received partial sums.
std::vector<SpanEvent> scatter_spans(std::span<const TileRecord> records, const TileGrid& grid,
                                     uint64_t base_ns);

}  // namespace tandem
