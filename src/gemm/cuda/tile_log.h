// Per-tile timeline records of a fused kernel. Kernels only record if compiled with
// TANDEM_DEVICE_TIMELINE (a CMake list of variants); others contain none of it.
#pragma once

#include "observe/tile_record.h"

namespace tandem::gpu {

struct TileLog {
  TileRecord* records = nullptr;  ///< zeroed, by row and column of tiles; null: record nothing
  uint32_t* products = nullptr;   ///< kProductWords per SM, for the current tile
  int columns = 0;                ///< including those that only pad a cluster
};
constexpr int kProductWords = 2 * 3;  // begin and end by warpgroup

/// Tiles that a kernel records; none if compiled without a timeline.
struct RecordedTiles {
  int rows = 0, columns = 0;
};

}  // namespace tandem::gpu
