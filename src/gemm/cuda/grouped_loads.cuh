// Loads of a grouped GEMM's k-block into a stage (grouped_kernel.cuh), in addition to the dense
// form of stage_filler.cuh: the weight's rows in two halves, transposed weights, and rows of x
// gathered by a warp.
#pragma once

#include "gemm/cuda/gemm_block.cuh"
#include "gemm/cuda/grouped.h"
#include "gemm/cuda/grouped_arrivals.cuh"
#include "gemm/cuda/stage_filler.cuh"

namespace tandem::gpu::fused {

/// Loads the two halves of the tile's columns, at rows `low` and `high` of the weight; in a pair,
/// each block loads one of them for both. With `kGathered`, x's rows are loaded elsewhere.
template <bool kGathered, class Tiles>
__device__ void load_halves(StageFiller<Tiles>& stages, const CUtensorMap& x,
                            const CUtensorMap& weight, int step, int row, int low, int high) {
  constexpr uint32_t kHalf = Tiles::kWeightBytes / 2;
  constexpr auto kNormal = stages.kNormal;
  const int at = step * Tiles::kStepOfK;
  uint64_t* const full = stages.begin(Tiles::kWeightBytes + (kGathered ? 0 : Tiles::kXBytes));
  std::byte* const columns = stages.weight();
  if constexpr (!kGathered) {
    cute::SM90_TMA_LOAD_2D::copy(&x, full, kNormal, stages.x(), at, row);
  }
  if constexpr (Tiles::kCluster == 2) {
    cute::SM90_TMA_LOAD_MULTICAST_2D::copy(&weight, full, uint16_t(3), kNormal,
                                           columns + stages.half() * kHalf, at,
                                           stages.half() == 0 ? low : high);
  } else {
    cute::SM90_TMA_LOAD_2D::copy(&weight, full, kNormal, columns, at, low);
    cute::SM90_TMA_LOAD_2D::copy(&weight, full, kNormal, columns + kHalf, at, high);
  }
  stages.end();
}

/// Loads from a stack of transposed weights, one matrix after the other.
template <class Tiles>
__device__ void load_transposed(StageFiller<Tiles>& stages, const CUtensorMap& x,
                                const CUtensorMap& weight, int step, int row, int column,
                                int matrix) {
  constexpr int kColumns = kStepBytes / int(sizeof(typename Tiles::Operand));
  constexpr int kBoxes = int(Tiles::kWeightBytes / kTransposedBox) / Tiles::kCluster;
  constexpr auto kNormal = stages.kNormal;
  const int at = step * Tiles::kStepOfK;
  uint64_t* const full = stages.begin(Tiles::kXBytes + Tiles::kWeightBytes);
  cute::SM90_TMA_LOAD_2D::copy(&x, full, kNormal, stages.x(), at, row);
#pragma unroll
  for (int i = 0; i < kBoxes; ++i) {
    const int box = Tiles::kCluster == 2 ? stages.half() * kBoxes + i : i;
    std::byte* const to = stages.weight() + box * kTransposedBox;
    if constexpr (Tiles::kCluster == 2) {
      cute::SM90_TMA_LOAD_MULTICAST_3D::copy(&weight, full, uint16_t(3), kNormal, to,
                                             column + box * kColumns, at, matrix);
    } else {
      cute::SM90_TMA_LOAD_3D::copy(&weight, full, kNormal, to, column + box * kColumns, at, matrix);
    }
  }
  stages.end();
}

/// Loads x's rows in the helper warp, 16 bytes per lane (cp.async), into the layout that TMA would
/// produce. Counterpart of the loading thread: the same k-blocks in the same order.
template <class Roles>
struct RowGatherer {
  using Tiles = typename Roles::Tiles;
  using Params = typename Roles::Params;
  using Work = typename Roles::Work;

  __device__ static void run(const Params& params, typename Tiles::Shared& shared) {
    constexpr int kRowsAtATime = 4, kPasses = Tiles::kTileRows / kRowsAtATime;
    const int lane = int(threadIdx.x) % 32, first = lane / 8, chunk = lane % 8;
    // Chunks are swizzled by the row index modulo 8, which two passes cover.
    const uint32_t even = first * 128 + ((chunk ^ first) << 4),
                   odd = (first + kRowsAtATime) * 128 + ((chunk ^ (first + kRowsAtATime)) << 4);
    PipelineState<Tiles::kStages> filling;
    int awaited = 0;
    Serpentine direction;
    GemmBlock<Roles>::for_each_work(params, [&](const Work& work) {
      if (params.arrivals.arrived && awaited < work.stage) {
        await_sources(params.arrivals, awaited, work.stage, lane);
        awaited = work.stage;
      }
      int source[Tiles::kTileRows / 32];  // sources of rows lane, lane + 32, ...
#pragma unroll
      for (int i = 0; i < Tiles::kTileRows / 32; ++i) {
        source[i] = __ldg(params.source + work.row * Tiles::kTileRows + 32 * i + lane);
      }
#pragma unroll 1
      for (int number = 0; number < work.end; ++number) {
        const int64_t at = int64_t(direction.step_of(work, number)) * kStepBytes + chunk * 16;
        const bool inside = at < params.row_bytes;
        // Address of local rows by their number, too. Both are sums: the compiler would select
        // between parameters by an indexed load.
        const std::byte* const chunks = params.rows + at;
        [[maybe_unused]] const std::byte* const local =
            params.local + (at - kLocalRows * params.row_bytes);
        shared.empty[filling.index].wait(filling.phase ^ 1);
        const uint32_t to = address_of(shared.x[filling.index]);
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
          constexpr int kPassesOf32 = 32 / kRowsAtATime;
          const int row =
              __shfl_sync(~0u, source[i / kPassesOf32], i % kPassesOf32 * kRowsAtATime + first);
          const bool there = inside && row >= 0;
          const std::byte* const from =
              (!Tiles::Product::kFp8 && row >= kLocalRows ? local : chunks) +
              uint64_t(uint32_t(max(row, 0))) * uint32_t(params.row_bytes);
          copy_16(to + (i % 2 ? odd : even) + i / 2 * (2 * kRowsAtATime * 128), from, there);
        }
        // This lane's share of the stage arrives once its copies have.
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(
                         address_of(&shared.full[filling.index]))
                     : "memory");
        filling.advance();
      }
      if (params.alternates) direction.reverse();
    });
  }

 private:
  /// Writes zeros unless the row is `there`.
  __device__ static void copy_16(uint32_t to, const std::byte* from, bool there) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(there ? 16 : 0)
                 : "memory");
  }
};

}  // namespace tandem::gpu::fused
