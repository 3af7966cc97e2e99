// GEMM of few rows by a coded weight (coded_layout.h) on Hopper: a block multiplies 128 rows of the
// weight, which are the rows of mma.sync's tiles, by all rows of x, their columns. Codes, scales
// and x come by TMA through a ring of stages, a step of k each; codes become bf16 in registers. A
// warp has 16 rows of the weight.
//
// Order: a group's products are added by the tensor cores from 0, 16 inputs at a time. Then sum =
// sum + scale x group's sum, rounded once, over the groups of a split in order, and over splits in
// order (rows_splits.cuh). So a result's bits depend on the weight's shape only.
#pragma once

#include <cuda.h>
#include <cutlass/arch/barrier.h>

#include <cstddef>
#include <cstdint>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "core/cuda/early_start.cuh"
#include "core/cuda/multiply_tile.cuh"
#include "gemm/cuda/coded_codes.cuh"
#include "gemm/cuda/coded_layout.h"
#include "gemm/cuda/gemm_tiles.cuh"
#include "gemm/cuda/rows_splits.cuh"

namespace tandem::gpu::coded {

using rows::Params, rows::Work;

/// kRows: of x, a multiple of 8; kBlocks: of an SM.
template <int kRows_, int kStages_, int kBlocks_>
struct Tile {
  static constexpr int kRows = kRows_, kStages = kStages_, kBlocks = kBlocks_;
  static constexpr int kWeightRows = 128, kWarps = kWeightRows / 16;
  static constexpr int kMultiplying = kWarps * 32, kThreads = kMultiplying + 32;
  static constexpr int kTiles = kRows / 8;  // of a warp
  static constexpr uint32_t kCodeBytes = kWeightRows * kCodedStep;
  static constexpr uint32_t kBoxBytes = kRows * 128;  // 64 inputs of x
  static constexpr uint32_t kScaleBytes = kWeightRows * 4;
  static constexpr uint32_t kStageBytes = kCodeBytes + 2 * kBoxBytes + kScaleBytes;
  /// Between the sums of two rows of x in shared memory, as in rows_product.cuh.
  static constexpr int kSumStride = kWeightRows + 4;

  struct Shared {
    struct Stages {
      alignas(1024) std::byte codes[kStages][kCodeBytes];
      alignas(1024) std::byte x[kStages][2][kBoxBytes];
      alignas(128) uint32_t scales[kStages][kWeightRows];
    };
    union {
      Stages stages;
      float sums[kRows][kSumStride];  // once all stages are used
    };
    fused::FullBarrier full[kStages];
    fused::EmptyBarrier empty[kStages];
  };
};

/// Tensor maps: codes and scales in boxes of a tile's rows (with SwiGLU half of them), x of kRows
/// rows and 64 inputs.
struct Maps {
  CUtensorMap codes, scales, x;
};

template <class T, bool kSwiglu>
class Loader {
 public:
  __device__ Loader(typename T::Shared& shared, const Maps& maps, const Params& p,
                    const Work<T, kSwiglu>& work)
      : shared_(shared), maps_(maps), p_(p), work_(work) {}

  /// Called by one thread.
  __device__ void run() {
    const int steps = work_.end - work_.begin, ready = min(steps, T::kStages);
    for (int i = 0; i < ready; ++i) load_weight(i, i);
    wait_for_previous();
    for (int i = 0; i < ready; ++i) load_x(i, i);
    fused::PipelineState<T::kStages> state;
    for (int i = ready; i < steps; ++i) {
      shared_.empty[state.index].wait(state.phase);
      load_weight(state.index, i);
      load_x(state.index, i);
      state.advance();
    }
  }

 private:
  static constexpr auto kStreamed = uint64_t(cute::TMA::CacheHintSm90::EVICT_FIRST);
  static constexpr auto kReused = uint64_t(cute::TMA::CacheHintSm90::EVICT_LAST);
  static constexpr int kColumns = Work<T, kSwiglu>::kColumns;

  __device__ uint64_t* full(int stage) { return reinterpret_cast<uint64_t*>(&shared_.full[stage]); }
  __device__ void load_rows(int stage, int step, int first, int to) {
    cute::SM90_TMA_LOAD_2D::copy(&maps_.codes, full(stage), kStreamed,
                                 shared_.stages.codes[stage] + to * kCodedStep, step * kCodedStep,
                                 first);
    cute::SM90_TMA_LOAD_2D::copy(&maps_.scales, full(stage), kStreamed,
                                 shared_.stages.scales[stage] + to, first, step);
  }
  __device__ void load_weight(int stage, int step) {
    shared_.full[stage].arrive_and_expect_tx(T::kStageBytes);
    load_rows(stage, work_.begin + step, work_.first_n, 0);
    if constexpr (kSwiglu) load_rows(stage, work_.begin + step, p_.n + work_.first_n, kColumns);
  }
  __device__ void load_x(int stage, int step) {
    const int at = (work_.begin + step) * kCodedStep;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      cute::SM90_TMA_LOAD_3D::copy(&maps_.x, full(stage), kReused, shared_.stages.x[stage][half],
                                   at + half * kCodedStep / 2, 0, 0);
    }
  }

  typename T::Shared& shared_;
  const Maps& maps_;
  const Params& p_;
  const Work<T, kSwiglu>& work_;
};

/// Vector of 16 bytes of a row of 128 bytes, as TMA's swizzle places it.
__device__ inline uint4 vector_at(const std::byte* box, int row, int vector) {
  return *reinterpret_cast<const uint4*>(box + row * 128 + (vector ^ row % 8) * 16);
}

/// A warp's sums of its 16 rows of the weight and all rows of x, in mma.m16n8k16's fragments.
template <class T, WeightFormat kFormat>
class Multiplier {
  using Codes = DeviceCodes<kFormat>;

 public:
  __device__ explicit Multiplier(typename T::Shared& shared)
      : shared_(shared), first_row_(int(threadIdx.x) / 32 * 16), lane_(int(threadIdx.x) % 32) {}

  __device__ void run(int steps) {
    fused::PipelineState<T::kStages> state;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      shared_.full[state.index].wait(state.phase);
      asm volatile("" ::: "memory");  // the wait does not keep reads after it
      add_step(state.index);
      __syncwarp();
      if (lane_ == 0) shared_.empty[state.index].arrive();
      state.advance();
    }
  }

  /// Leaves the sums in shared memory, by row of x.
  __device__ void write() {
#pragma unroll
    for (int t = 0; t < T::kTiles; ++t) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        shared_.sums[t * 8 + lane_ % 4 * 2 + e % 2][first_row_ + lane_ / 4 + e / 2 * 8] =
            sums_[t][e];
      }
    }
  }

 private:
  __device__ void add_step(int stage) {
    const int row = first_row_ + lane_ / 4;
    const uint32_t scales[2] = {shared_.stages.scales[stage][row],
                                shared_.stages.scales[stage][row + 8]};
    float group[T::kTiles][4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      multiply_half(stage, half, group);
      if (Codes::kScalesOfStep == 1 && half == 0) continue;
      const float upper = Codes::scale(scales[0], half), lower = Codes::scale(scales[1], half);
#pragma unroll
      for (int t = 0; t < T::kTiles; ++t) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          sums_[t][e] = __fmaf_rn(e < 2 ? upper : lower, group[t][e], sums_[t][e]);
          group[t][e] = 0;
        }
      }
    }
  }

  /// Adds 64 inputs' products to `group`, in four tiles of 16: of four inputs of each lane.
  __device__ void multiply_half(int stage, int half, float (&group)[T::kTiles][4]) {
    const int row = lane_ / 4, quad = lane_ % 4;
    const std::byte* const codes = shared_.stages.codes[stage];
    const uint4 upper = vector_at(codes, first_row_ + row, 2 * quad + half);
    const uint4 lower = vector_at(codes, first_row_ + row + 8, 2 * quad + half);
    const uint32_t of_upper[] = {upper.x, upper.y, upper.z, upper.w};
    const uint32_t of_lower[] = {lower.x, lower.y, lower.z, lower.w};
#pragma unroll
    for (int two = 0; two < 2; ++two) {
      uint4 x[T::kTiles];
#pragma unroll
      for (int t = 0; t < T::kTiles; ++t) {
        x[t] = vector_at(shared_.stages.x[stage][half], t * 8 + row, 2 * quad + two);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const CodePairs a = Codes::pairs(of_upper[2 * two + i]);
        const CodePairs b = Codes::pairs(of_lower[2 * two + i]);
#pragma unroll
        for (int t = 0; t < T::kTiles; ++t) {
          const uint32_t of_x[2] = {i == 0 ? x[t].x : x[t].z, i == 0 ? x[t].y : x[t].w};
          multiply_tile(group[t], {a.first, b.first, a.last, b.last}, of_x);
        }
      }
    }
  }

  typename T::Shared& shared_;
  int first_row_, lane_;
  float sums_[T::kTiles][4] = {};
};

template <class T, WeightFormat kFormat, typename Out, bool kSwiglu>
__global__ void __launch_bounds__(T::kThreads, T::kBlocks)
    kernel(const __grid_constant__ Maps maps, const Params p) {
  extern __shared__ std::byte memory[];
  auto& shared = *reinterpret_cast<typename T::Shared*>(
      memory + (1024 - fused::address_of(memory) % 1024) % 1024);
  const Work<T, kSwiglu> work(p);
  if (threadIdx.x == 0) {
    for (int i = 0; i < T::kStages; ++i) {
      shared.full[i].init(1);
      shared.empty[i].init(T::kWarps);
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  let_next_start();
  if (threadIdx.x >= T::kMultiplying) {
    if (threadIdx.x == T::kMultiplying) Loader<T, kSwiglu>(shared, maps, p, work).run();
    __syncwarp();
    wait_for_previous();
  } else {
    wait_for_previous();
    Multiplier<T, kFormat> multiplier(shared);
    multiplier.run(work.end - work.begin);
    // All warps have read the stages that the sums replace.
    asm volatile("bar.sync 1, %0;" ::"n"(T::kMultiplying) : "memory");
    multiplier.write();
  }
  rows::sync_cluster();
  rows::add_splits<T, Out, kSwiglu>(shared, p, work);
  if (p.splits > 1) rows::sync_cluster();  // others may still read these sums
}

/// Shared memory of a block, with room to align it.
template <class T>
constexpr size_t kSharedBytes = sizeof(typename T::Shared) + 1024;

}  // namespace tandem::gpu::coded
