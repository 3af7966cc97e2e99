// Storing warp of gemm_block.cuh, one thread of it: copies the results of a multiplying warpgroup
// (staged_tile.cuh) from shared to global memory, on this GPU or a peer. The sink sets the
// destination.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "gemm/cuda/gemm_tiles.cuh"
#include "gemm/cuda/tensor_map.h"

namespace tandem::gpu::fused {

template <class Tiles>
class TileStorer {
  using Shared = typename Tiles::Shared;
  static constexpr int kBoxes = Tiles::kBoxes, kBuffers = Tiles::kBuffers;

 public:
  __device__ TileStorer(Shared& shared, int group) : shared_(shared), group_(group) {}

  /// Stores this warpgroup's half of a tile. `begin` is called when its first box is ready.
  template <class Begin>
  __device__ void store(const CUtensorMap& to, int column, int row, Begin&& begin) {
    store_boxes(
        [&](int box, const std::byte* from) {
          cute::SM90_TMA_STORE_2D::copy(&to, from, column + box * Tiles::kBoxColumns,
                                        row + group_ * Tiles::kGroupRows);
        },
        begin);
  }
  __device__ void store(const CUtensorMap& to, int column, int row) {
    store(to, column, row, [] {});
  }
  /// Stores in a wire format, by boxes of `box_bytes`; discarded if `to` is null.
  __device__ void store_slice(std::byte* to, int box_bytes) {
    store_boxes(
        [&](int box, const std::byte* from) {
          if (to) cute::SM90_BULK_COPY_S2G::copy(from, to + box * box_bytes, box_bytes);
        },
        [] {});
  }
  /// Waits until stored data is in memory, visible to everyone who sees a signal that is released,
  /// after a fence, after this.
  __device__ static void complete() {
    asm volatile("cp.async.bulk.wait_group 0;\n\tfence.proxy.async;" ::: "memory");
  }

 private:
  template <class Copy, class Begin>
  __device__ void store_boxes(Copy&& copy, Begin&& begin) {
#pragma unroll 1
    for (int box = 0; box < kBoxes; ++box) {
      shared_.written[group_][buffer_.index].wait(buffer_.phase);
      if (box == 0) begin();
      copy(box, shared_.staged[group_][buffer_.index]);
      cute::tma_store_arrive();
      if (kBuffers == 2 && box > 0) {
        cute::tma_store_wait<1>();
        shared_.taken[group_][buffer_.index ^ 1].arrive();
      }
      if (kBuffers == 1 || box + 1 == kBoxes) {
        cute::tma_store_wait<0>();
        shared_.taken[group_][buffer_.index].arrive();
      }
      buffer_.advance();
    }
  }

  static_assert(kBuffers == 1 || kBuffers == 2);
  Shared& shared_;
  int group_;
  PipelineState<kBuffers> buffer_;
};

}  // namespace tandem::gpu::fused
