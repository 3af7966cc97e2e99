// Where a fused kernel records its tiles. Kernels record only where they were compiled with
// TANDEM_DEVICE_TIMELINE (a CMake list of variants); the others have none of it.
#pragma once

#include "observe/tile_record.h"

namespace tandem::gpu {

struct TileLog {
  TileRecord* records = nullptr;  ///< zeroed, by row and column of tiles; nullptr: record nothing
  uint32_t* products = nullptr;   ///< kProductWords per SM, for the tile at hand
  int columns = 0;                ///< the kernel's own; those that only fill up a cluster too
};
constexpr int kProductWords = 2 * 3;  // begin and end by warpgroup

/// Tiles that a kernel records; none where it was compiled without.
struct RecordedTiles {
  int rows = 0, columns = 0;
};

}  // namespace tandem::gpu
