// The sending half of the fused GEMM+RS: one thread of every block takes the block's tiles of other
// ranks from the outbox, in the order in which they are computed, and carries them to their owners.
// It may lag behind the product as far as the wire makes it.
#pragma once

#include "overlap/cuda/courier.cuh"
#include "overlap/cuda/tile_timeline.cuh"
#include "overlap/gemm_rs/cuda/handover.cuh"
#include "overlap/gemm_rs/cuda/scatter.cuh"

namespace tandem::gpu::fused {

/// In shared memory, and all of it by one thread but for `handover`.
class Sender {
 public:
  Handover handover;

  /// By one thread, before anything else.
  CUTLASS_DEVICE void open() {
    handover.open();
    courier_.open();
    entered_ = 0;
    taken_ = 0;
    lost_ = false;
    row_ = -1;
  }

  /// Another rank's tile, the next that the block's consumers give. Returns before it has arrived.
  template <int kTileBytes>
  CUTLASS_DEVICE void send(Scatter const& scatter, Stamps const& stamps, int row, int column) {
    static_assert(kTileBytes % Courier::kChunk == 0);
    ++taken_;
    // What was sent before is not kept waiting.
    if (must_wait(scatter, row, column)) finish(scatter, stamps);
    forget(row);
    const int rank = scatter.staging.rank;
    if (!handover.take(taken_, scatter.watch, rank, scatter.place_of(row, column).tile)) {
      lost_ = true;
    }
    forget(row);
    wait_for_owner(scatter, stamps, row, column);
    forget(row);
    if (lost_) return scatter.count_tile();
    const Scatter::Place place = scatter.place_of(row, column);
    stamps.stamp(cute::make_coord(row, column), 0, &TileRecord::wait_begin);
    courier_.carry(scatter.staging_at(place.owner, scatter.staging.rank, place.tile, kTileBytes),
                   scatter.outbox_at(place, kTileBytes), kTileBytes / Courier::kChunk,
                   scatter.pace_ns, [&] { deliver(scatter, stamps); });
    row_ = row;
    column_ = column;
  }

  /// Until all that was sent has arrived.
  CUTLASS_DEVICE void finish(Scatter const& scatter, Stamps const& stamps) {
    courier_.wait();
    deliver(scatter, stamps);
  }

 private:
  // What follows from it is computed anew rather than kept: registers are few.
  CUTLASS_DEVICE static void forget(int& row) { asm volatile("" : "+r"(row)); }

  CUTLASS_DEVICE bool must_wait(Scatter const& scatter, int row, int column) const {
    return !(entered_ >> scatter.place_of(row, column).owner & 1) || !handover.has(taken_);
  }

  // When a wait gives up, nothing more is sent, and who waits for it says so.
  CUTLASS_DEVICE void wait_for_owner(Scatter const& scatter, Stamps const& stamps, int row,
                                     int column) {
    const int owner = scatter.place_of(row, column).owner;
    if (entered_ >> owner & 1) return;
    stamps.stamp(cute::make_coord(row, column), 0, &TileRecord::held_begin);
    const uint64_t* flag = scatter.signals_of(scatter.staging.rank) + scatter.entered + owner;
    if (!wait_signal(flag, scatter.this_epoch(), scatter.watch, OpId::gemm_rs, owner)) lost_ = true;
    stamps.stamp(cute::make_coord(row, column), 0, &TileRecord::held_end);
    entered_ |= 1u << owner;
  }

  /// Tells the owner of the tile that was sent last, which has arrived.
  CUTLASS_DEVICE void deliver(Scatter const& scatter, Stamps const& stamps) {
    const int row = row_, column = column_;
    if (row < 0) return;
    const Scatter::Place place = scatter.place_of(row, column);
    release_signal(scatter.landed_at(place.owner, scatter.staging.rank, place.tile),
                   scatter.this_epoch());
    stamps.stamp(cute::make_coord(row, column), 0, &TileRecord::wait_end);
    scatter.count_tile();
    row_ = -1;
  }

  Courier courier_;
  unsigned entered_;  // owners seen to have entered this call, by bit
  unsigned taken_;    // tiles
  bool lost_;         // a wait gave up
  int row_, column_;  // of the tile that is on its way; row -1: none
};

}  // namespace tandem::gpu::fused
