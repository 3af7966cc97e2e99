// Permute: warps copy rows of x to their positions sorted by expert, before the first GEMM or
// concurrently with it.
#pragma once

#include "core/cuda/concurrent.cuh"
#include "gemm/cuda/grouped_arrivals.cuh"
#include "overlap/moe/cuda/expert_rows.h"

namespace tandem::gpu {

constexpr int kMovedVecs = 8;  // per lane, in flight

/// Called by a warp: copies row `from` of x, or zeros if `from` < 0, to row `to`.
__device__ inline void move_row(const MoeGather& p, int from, int64_t to, int lane, int64_t vecs) {
  const void* const matrix = p.local && (from & kLocalRows) ? p.local : p.x;
  const auto* const x = static_cast<const uint4*>(matrix) + (from & (kLocalRows - 1)) * vecs;
  auto* const out = static_cast<uint4*>(p.out) + to * vecs;
  for (int64_t first = lane; first < vecs; first += 32 * kMovedVecs) {
    uint4 values[kMovedVecs] = {};
#pragma unroll
    for (int i = 0; i < kMovedVecs; ++i) {
      // Other ranks store their rows: they must not be read through the read-only cache.
      if (from >= 0 && first + 32 * i < vecs) values[i] = __ldcg(x + first + 32 * i);
    }
#pragma unroll
    for (int i = 0; i < kMovedVecs; ++i) {
      if (first + 32 * i < vecs) out[first + 32 * i] = values[i];
    }
  }
}

// Few blocks move rows concurrently with a GEMM, so several rows share a warp's waits: for their
// positions, and for their stores.
constexpr int kOverlappedThreads = 1024, kRowsAtATime = 4;

/// Rows for consecutive positions within a tile.
struct MovedRows {
  int row = -1, stage = 0;
  int from = -1;  ///< source of this lane's row, in the first lanes
};

/// Rows of an ordered table, taken by warps in round-robin order.
struct RowSlots {
  schedule::RowSlot* order;
  uint32_t* ready;
  int rows;  ///< max per turn

  static RowSlots of(const GroupedTable& table, uint32_t* ready) {
    return {table.order, ready, table.row_tiles * kGroupedRows};
  }
  /// Returns no row if none is left.
  __device__ MovedRows next(const int32_t* source, int lane) const {
    for (const int64_t all = int64_t(order[0].row) * rows;;) {
      const int taken = lane == 0 ? atomicAdd(&order[1].row, 1) : 0;
      const int64_t number = int64_t(__shfl_sync(~0u, taken, 0)) * kRowsAtATime;
      if (number >= all) return {};
      const schedule::RowSlot slot = order[schedule::kOrderHead + number / rows];
      const int at = int(number % rows);
      if (at >= slot.rows * kGroupedRows) continue;
      const int row = slot.row * kGroupedRows + at;
      return {row, slot.stage, lane < kRowsAtATime ? __ldg(source + row + lane) : -1};
    }
  }
};

/// Called by all warps of some blocks. A warp looks up its next rows while it moves the current
/// ones.
__device__ inline void gather_slots(const RowSlots& slots, const MoeGather& p, int64_t vecs) {
  const int lane = int(threadIdx.x) % 32;
  int awaited = 0;
  MovedRows rows = slots.next(p.source, lane);
  while (rows.row >= 0) {
    const MovedRows next = slots.next(p.source, lane);
    if (p.arrivals.arrived && awaited < rows.stage) {
      await_sources(p.arrivals, awaited, rows.stage, lane);
      awaited = rows.stage;
    }
#pragma unroll 1
    for (int i = 0; i < kRowsAtATime; ++i) {
      move_row(p, __shfl_sync(~0u, rows.from, i), rows.row + i, lane, vecs);
    }
    __syncwarp();
    if (lane == 0) {
      asm volatile(
          "red.release.gpu.global.add.u32 [%0], %1;" ::"l"(slots.ready + rows.row / kGroupedRows),
          "r"(kRowsAtATime)
          : "memory");
    }
    rows = next;
  }
}

}  // namespace tandem::gpu
