// Tiling of a hand-written Hopper GEMM (gemm_block.cuh) and its shared memory layout: a ring of
// stages for operands, and buffers for finished tiles.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cstddef>
#include <cstdint>
#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/util.hpp>

#include "gemm/cuda/warpgroup_product.cuh"

namespace tandem::gpu::fused {

struct TileOptions {
  int cluster = 2;      ///< blocks that share the weight's rows: each loads a slice for all
  int buffers = 2;      ///< box buffers per multiplying warpgroup; 0: nothing is staged
  int local_bytes = 0;  ///< shared memory that a kernel uses in addition
  /// The first half of a tile's columns is the gate of the second: silu(gate) x up is stored, with
  /// half as many columns.
  bool gated = false;
  /// An operand is [K, rows] or [K, columns]: strided along K.
  bool x_transposed = false, weight_transposed = false;
};

/// Slot of a ring of barriers, and its current phase.
template <int kSlots>
struct PipelineState {
  int index = 0;
  uint32_t phase = 0;
  __device__ void advance() {
    if (++index == kSlots) index = 0, phase ^= 1;
  }
};

using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;

/// Shared memory of a block: stages and buffers, and the barriers that guard them.
template <int kStages, int kXBytes, int kWeightBytes, int kGroups, int kBuffers, int kBoxBytes>
struct BlockMemory {
  alignas(1024) std::byte x[kStages][kXBytes];
  alignas(1024) std::byte weight[kStages][kWeightBytes];
  alignas(1024) std::byte staged[kGroups][kBuffers][kBoxBytes];
  FullBarrier full[kStages];
  EmptyBarrier empty[kStages];
  EmptyBarrier written[kGroups][kBuffers], taken[kGroups][kBuffers];
};
template <int kStages, int kXBytes, int kWeightBytes, int kGroups, int kBoxBytes>
struct BlockMemory<kStages, kXBytes, kWeightBytes, kGroups, 0, kBoxBytes> {
  alignas(1024) std::byte x[kStages][kXBytes];
  alignas(1024) std::byte weight[kStages][kWeightBytes];
  FullBarrier full[kStages];
  EmptyBarrier empty[kStages];
};

/// Tiles of 128 x 256, or 128 x 128 for e4m3 operands. `Element`: dtype of the result, and of
/// everything that is added to it.
template <class Operand_, class Element_, TileOptions kOptions_>
struct GemmTiles {
  using Operand = Operand_;
  using Element = Element_;
  using Product = WarpgroupProduct<Operand>;

  static constexpr TileOptions kOptions = kOptions_;
  static constexpr int kTileRows = 128, kTileColumns = Product::kColumns, kGroupRows = 64;
  static constexpr int kGroups = 2, kCluster = kOptions.cluster;
  static constexpr int kStepOfK = fused::kStepOfK<Operand>;
  static constexpr int kSums = kGroupRows * kTileColumns / 128;  // accumulators of a thread

  // A stage: a k-block of the tile's operands, or added rows in place of the weight.
  static constexpr uint32_t kXBytes = kTileRows * kStepBytes;
  static constexpr uint32_t kWeightBytes = kTileColumns * kStepBytes;
  static constexpr int kStepsOfRows = kTileRows / kGroupRows;  // stages of added rows per tile

  // A box: the slice of a warpgroup's half of a finished tile that fits a buffer.
  static constexpr int kBuffers = kOptions.buffers;
  static constexpr int kBoxColumns = 128 / sizeof(Element);
  static constexpr int kStoredColumns = kOptions.gated ? kTileColumns / 2 : kTileColumns;
  static constexpr int kBoxes = kBuffers == 0 ? 0 : kStoredColumns / kBoxColumns;
  static constexpr int kColumnGroups16 = kBoxColumns / 16;
  static constexpr int kStoredWords = kSums / (kOptions.gated ? 4 : 2);  // per thread, rounded
  static constexpr uint32_t kBoxBytes = kGroupRows * kBoxColumns * sizeof(Element);
  static_assert(kBoxes * kBoxBytes <= kWeightBytes);
  /// Min k-blocks between the stores of two boxes of the previous tile, and min k-blocks that
  /// overlap all of them. With a single buffer, the next box waits one k-block longer until memory
  /// has taken the previous one.
  static constexpr int kEvery = kBuffers == 1 ? 2 : 1, kLead = kBoxes * kEvery;

  // A block has 227 KiB of shared memory; barriers and alignment take less than two.
  static constexpr int kStages =
      int(((227 - 2) * 1024 - kOptions.local_bytes - kGroups * kBuffers * kBoxBytes) /
          (kXBytes + kWeightBytes));

  using Shared = BlockMemory<kStages, kXBytes, kWeightBytes, kGroups, kBuffers, kBoxBytes>;

  /// Called by one thread of the block. `arrivals`: at a stage's `full`, in addition to the bytes.
  __device__ static void open(Shared& shared, int arrivals) {
    for (int i = 0; i < kStages; ++i) {
      shared.full[i].init(arrivals);
      shared.empty[i].init(kCluster * kGroups);
    }
    if constexpr (kBuffers > 0) {
      for (int group = 0; group < kGroups; ++group) {
        for (int i = 0; i < kBuffers; ++i) {
          shared.written[group][i].init(4);  // warps
          shared.taken[group][i].init(1);
        }
      }
    }
    cutlass::arch::fence_barrier_init();
  }
};

__device__ inline uint32_t address_of(const void* shared) {
  return cute::cast_smem_ptr_to_uint(shared);
}

}  // namespace tandem::gpu::fused
