// What a block of grouped_wgrad.h's kernel does. One warp loads, two warpgroups multiply, each 64
// rows of a tile of 128 x 256 of a group's weight. A k-block is 64 of the group's rows: both
// operands are transposed, as they lie. Blocks take every so manieth tile, a group's one after the
// other, and skip groups without rows. Loading runs ahead into the next tile while sums are added
// to memory.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/copy_sm90_tma.hpp>

#include "gemm/cuda/gemm_tiles.cuh"
#include "gemm/cuda/grouped_wgrad.h"
#include "gemm/cuda/tensor_map.h"
#include "gemm/cuda/warpgroup_product.cuh"

namespace tandem::gpu::fused {

template <class Operand>
struct WgradBlock {
  static constexpr int kTileRows = 128, kTileColumns = 256, kGroups = 2, kCluster = 1;
  static constexpr int kBoxColumns = kStepOfK<Operand>;  // of an operand, beside one another
  static constexpr int kStepRows = 64;                   // of a group
  static constexpr int kThreads = 128 * (1 + kGroups);
  static constexpr int kLoadingRegisters = 72, kMultiplyingRegisters = 216;  // as gemm_block.cuh
  static constexpr int kDyBoxes = kTileRows / kBoxColumns, kXBoxes = kTileColumns / kBoxColumns;
  static constexpr uint32_t kDyBytes = kDyBoxes * kTransposedBox,
                            kXBytes = kXBoxes * kTransposedBox;
  static constexpr int kStages = 4;
  static constexpr int kSums = 64 * kTileColumns / 128;  // of a thread
  /// Row tiles of a weight that are swept together.
  static constexpr int kBand = 8;

  struct Shared {
    alignas(1024) std::byte dy[kStages][kDyBytes];
    alignas(1024) std::byte x[kStages][kXBytes];
    cutlass::arch::ClusterTransactionBarrier full[kStages];
    cutlass::arch::ClusterBarrier empty[kStages];
  };
  static constexpr int kSharedBytes = int(sizeof(Shared)) + 1024;
  static_assert(kSharedBytes <= 227 * 1024);

  struct Params {
    CUtensorMap dy, x;
    const schedule::GroupRows* group_rows;
    float* dweight;
    int groups, row_tiles, column_tiles;
    int rows, columns;
  };

  /// `body` takes a group's number, its rows, and a tile of its weight.
  template <class Body>
  __device__ static void for_each_tile(const Params& params, Body&& body) {
    const int tiles = params.row_tiles * params.column_tiles;
    int group = 0, at = int(blockIdx.x);
    while (true) {
      for (; at >= tiles; at -= tiles) ++group;
      if (group >= params.groups) return;
      const schedule::GroupRows rows = params.group_rows[group];
      if (rows.rows > 0) {
        body(group, rows, schedule::grouped_tile(at, params.row_tiles, params.column_tiles, kBand));
      }
      at += int(gridDim.x);
    }
  }
  __device__ static int steps_of(const schedule::GroupRows& rows) {
    return (rows.rows + kStepRows - 1) / kStepRows;
  }

  __device__ static void load(const Params& params, Shared& shared) {
    constexpr auto kNormal = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    PipelineState<kStages> stage;
    for_each_tile(params, [&](int, const schedule::GroupRows& rows, const schedule::Tile& tile) {
      const int steps = steps_of(rows);
#pragma unroll 1
      for (int step = 0; step < steps; ++step) {
        const int row = rows.first + step * kStepRows;
        shared.empty[stage.index].wait(stage.phase ^ 1);
        shared.full[stage.index].arrive_and_expect_tx(kDyBytes + kXBytes);
        auto* const full = reinterpret_cast<uint64_t*>(&shared.full[stage.index]);
        const auto boxes = [&](const CUtensorMap& map, std::byte* to, int count, int column) {
#pragma unroll
          for (int box = 0; box < count; ++box) {
            cute::SM90_TMA_LOAD_2D::copy(&map, full, kNormal, to + box * kTransposedBox,
                                         column + box * kBoxColumns, row);
          }
        };
        boxes(params.dy, shared.dy[stage.index], kDyBoxes, tile.row * kTileRows);
        boxes(params.x, shared.x[stage.index], kXBoxes, tile.column * kTileColumns);
        stage.advance();
      }
    });
  }

  __device__ static void multiply(const Params& params, Shared& shared, int half) {
    const int thread = int(threadIdx.x) % 128, warp = thread / 32, lane = thread % 32;
    const uint64_t dy =
        operand_descriptor<true>(address_of(shared.dy[0]) + half * (kDyBytes / kGroups));
    const uint64_t x = operand_descriptor<true>(address_of(shared.x[0]));
    PipelineState<kStages> stage;
    float sums[kSums];
    for_each_tile(
        params, [&](int group, const schedule::GroupRows& rows, const schedule::Tile& tile) {
          const int steps = steps_of(rows);
          int unreleased = -1;
          const auto release = [&] {
            if (unreleased >= 0 && thread == 0) shared.empty[unreleased].arrive();
          };
#pragma unroll 1
          for (int step = 0; step < steps; ++step) {
            shared.full[stage.index].wait(stage.phase);
            fence_sums(sums);
            cute::warpgroup_arrive();
            multiply_step<Operand, true, true>(sums, dy + stage.index * (kDyBytes >> 4),
                                               x + stage.index * (kXBytes >> 4), step == 0);
            cute::warpgroup_commit_batch();
            cute::warpgroup_wait<1>();
            fence_sums(sums);
            release();
            unreleased = stage.index;
            stage.advance();
          }
          cute::warpgroup_wait<0>();
          fence_sums(sums);
          release();
          const int row = tile.row * kTileRows + half * 64 + 16 * warp + lane / 4;
          const int column = tile.column * kTileColumns + 2 * (lane % 4);
          add(params, sums, group, row, column);
        });
  }

  /// This thread's sums, to rows `row` and 8 below, pairs of columns 8 apart.
  __device__ static void add(const Params& params, const float (&sums)[kSums], int group, int row,
                             int column) {
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      const int at = row + 8 * lower;
      if (at >= params.rows) continue;
      float* const to = params.dweight + (int64_t(group) * params.rows + at) * params.columns;
#pragma unroll
      for (int i = 0; i < kSums / 4; ++i) {
        if (column + 8 * i >= params.columns) continue;
        asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to + column + 8 * i),
                     "f"(sums[4 * i + 2 * lower]), "f"(sums[4 * i + 2 * lower + 1])
                     : "memory");
      }
    }
  }

  __device__ static void run(const Params& params, std::byte* memory) {
    auto& shared = *reinterpret_cast<Shared*>(memory + (1024 - address_of(memory) % 1024) % 1024);
    const int warp = __shfl_sync(0xffffffff, int(threadIdx.x) / 32, 0);
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) {
        shared.full[i].init(1);
        shared.empty[i].init(kGroups);
      }
      cutlass::arch::fence_barrier_init();
    }
    __syncthreads();
    if (warp < 4) {
      cutlass::arch::warpgroup_reg_dealloc<kLoadingRegisters>();
      if (warp == 0 && cute::elect_one_sync()) load(params, shared);
    } else {
      cutlass::arch::warpgroup_reg_alloc<kMultiplyingRegisters>();
      multiply(params, shared, warp / 4 - 1);
    }
  }
};

}  // namespace tandem::gpu::fused
