// Sending half of the CUTLASS GEMM+RS: one thread of every block copies the block's remote tiles
// from the local send buffer, in the order in which they are computed, to their owners. It
// may lag the main loop as far as the link requires.
#pragma once

#include "gemm/cuda/tile_timeline.cuh"
#include "overlap/contract/cuda/wait_ids.h"
#include "overlap/gemm_rs/cuda/copy_warp.cuh"
#include "overlap/gemm_rs/cuda/handover.cuh"
#include "overlap/gemm_rs/cuda/scatter.cuh"

namespace tandem::gpu::fused {

/// Lives in shared memory; all but `handover` is used by one thread.
class Sender {
 public:
  Handover handover;

  /// Called by one thread, first.
  CUTLASS_DEVICE void open() {
    handover.open();
    copier_.open();
    ready_flag_ = 0;
    tiles_ = 0;
    lost_ = false;
    row_ = -1;
  }

  /// Sends a remote tile, the next that the block's consumers publish. Returns before it has
  /// arrived.
  template <int kTileBytes>
  CUTLASS_DEVICE void send(Scatter const& scatter, Timestamps const& timestamps, int row,
                           int column) {
    static_assert(kTileBytes % PacedBulkCopier::kChunk == 0);
    ++tiles_;
    // Earlier tiles must be signalled before this waits.
    if (must_wait(scatter, row, column)) finish(scatter, timestamps);
    opaque(row);
    const int rank = scatter.staging.rank;
    if (!handover.wait_for_tile(tiles_, scatter.deadline, rank, scatter.locate(row, column).tile)) {
      lost_ = true;
    }
    opaque(row);
    wait_for_owner(scatter, timestamps, row, column);
    opaque(row);
    if (lost_) return scatter.count_tile();
    const Scatter::TileLocation location = scatter.locate(row, column);
    timestamps.stamp(cute::make_coord(row, column), true, &TileRecord::wait_begin);
    copier_.copy(
        scatter.staging_at(location.owner, scatter.staging.rank, location.tile, kTileBytes),
        scatter.send_buffer_at(location, kTileBytes), kTileBytes / PacedBulkCopier::kChunk,
        scatter.pace_ns, [&] { deliver(scatter, timestamps); });
    row_ = row;
    column_ = column;
  }

  /// Waits until everything sent has arrived.
  CUTLASS_DEVICE void finish(Scatter const& scatter, Timestamps const& timestamps) {
    copier_.wait();
    deliver(scatter, timestamps);
  }

 private:
  // A compiler barrier: makes the value opaque, so that expressions of it are recomputed rather
  // than kept in scarce registers.
  CUTLASS_DEVICE static void opaque(int& row) { asm volatile("" : "+r"(row)); }

  CUTLASS_DEVICE bool must_wait(Scatter const& scatter, int row, int column) const {
    return !(ready_flag_ >> scatter.locate(row, column).owner & 1) || !handover.has_tiles(tiles_);
  }

  // After a timeout nothing more is sent, and the peer that waits for it reports that.
  CUTLASS_DEVICE void wait_for_owner(Scatter const& scatter, Timestamps const& timestamps, int row,
                                     int column) {
    const int owner = scatter.locate(row, column).owner;
    if (ready_flag_ >> owner & 1) return;
    timestamps.stamp(cute::make_coord(row, column), true, &TileRecord::stalled_begin);
    const uint64_t* flag = scatter.signals_of(scatter.staging.rank) + scatter.ready_flags + owner;
    if (!wait_signal(flag, scatter.this_epoch(), scatter.deadline, kGemmRsWait, owner))
      lost_ = true;
    timestamps.stamp(cute::make_coord(row, column), true, &TileRecord::stalled_end);
    ready_flag_ |= 1u << owner;
  }

  /// Signals the owner of the last sent tile, which has arrived.
  CUTLASS_DEVICE void deliver(Scatter const& scatter, Timestamps const& timestamps) {
    const int row = row_, column = column_;
    if (row < 0) return;
    const Scatter::TileLocation location = scatter.locate(row, column);
    release_signal(scatter.arrival_at(location.owner, scatter.staging.rank, location.tile),
                   scatter.this_epoch());
    timestamps.stamp(cute::make_coord(row, column), true, &TileRecord::wait_end);
    scatter.count_tile();
    row_ = -1;
  }

  PacedBulkCopier copier_;
  unsigned ready_flag_;  // owners seen ready for this call, a bit each
  unsigned tiles_;       // sent so far, the current one included
  bool lost_;            // a wait timed out
  int row_, column_;     // tile in flight; row -1: none
};

}  // namespace tandem::gpu::fused
