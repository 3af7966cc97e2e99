// Shared by the CUTLASS GEMM+RS's epilogue and its sender: addresses and owners of tiles, and the
// count of finished ones.
#pragma once

#include <cutlass/cutlass.h>

#include <cute/arch/cluster_sm90.hpp>

#include "comm/device/device_signal.cuh"
#include "overlap/gemm_rs/cuda/cutlass.h"

namespace tandem::gpu::fused {

struct Scatter {
  PeerTable staging;
  std::byte* send_buffer;  // local send buffer
  size_t slot_bytes;
  int ready_flags, arrived_tiles, tiles_of_slot;
  CallCounter* calls;
  int shard_tiles, column_tiles;
  schedule::RsTileOrder order;  // in clusters
  int cluster_rows, cluster_columns;
  void* out;  // [m / ranks, n]
  int n;
  int pace_ns;         // between two chunks that a block sends
  unsigned all_tiles;  // including those outside the matrix
  Deadline deadline;

  /// Position of a tile within its owner's shard.
  struct TileLocation {
    int owner, row, tile;
  };

  CUTLASS_DEVICE uint64_t* signals_of(int rank) const { return staging.signals[rank]; }
  CUTLASS_DEVICE uint64_t* arrival_at(int owner, int source, int tile) const {
    return signals_of(owner) + arrived_tiles + int64_t(source) * tiles_of_slot + tile;
  }
  CUTLASS_DEVICE std::byte* staging_at(int owner, int source, int tile, int tile_bytes) const {
    return staging.memory[owner] + size_t(source) * slot_bytes + int64_t(tile) * tile_bytes;
  }
  CUTLASS_DEVICE std::byte* send_buffer_at(TileLocation const& location, int tile_bytes) const {
    return send_buffer + size_t(location.owner) * slot_bytes + int64_t(location.tile) * tile_bytes;
  }

  CUTLASS_DEVICE TileLocation locate(int row, int column) const {
    const int owner = row / shard_tiles, row_of_shard = row - owner * shard_tiles;
    return {owner, row_of_shard, row_of_shard * column_tiles + column};
  }
  /// False for the second half of a cluster at the right edge.
  CUTLASS_DEVICE bool is_inside(int column) const { return column < column_tiles; }
  CUTLASS_DEVICE bool is_local(int row, int column) const {
    return is_inside(column) && locate(row, column).owner == staging.rank;
  }
  CUTLASS_DEVICE bool is_remote(int row, int column) const {
    return is_inside(column) && locate(row, column).owner != staging.rank;
  }
  /// Whether the block has no tile to compute after this one.
  CUTLASS_DEVICE bool is_last(int row, int column) const {
    // Numbered as the scheduler does.
    const dim3 id = cute::cluster_id_in_grid(), grid = cute::cluster_grid_dims();
    const schedule::Tile last = tile_at(
        order, schedule::last_position(order, int(id.x + id.y * grid.x), int(grid.x * grid.y)));
    return row / cluster_rows == last.row && column / cluster_columns == last.column;
  }

  CUTLASS_DEVICE uint64_t this_epoch() const { return gpu::this_epoch(calls); }
  /// Called by one thread, when the tile is finished. The call's last tile advances the epoch: all
  /// readers of it have then counted theirs.
  CUTLASS_DEVICE void count_tile() const { finish_epoch_read(calls, all_tiles); }
};

}  // namespace tandem::gpu::fused
