// GEMM of few rows by a coded weight (coded_layout.h) on Hopper: a block multiplies rows of the
// weight, which are the rows of the tensor cores' tiles, by all rows of x, their columns. Codes,
// scales and x come by TMA through a ring of stages, a step of k each. Codes become bf16 in
// registers, from where the tensor cores read them, and x in shared memory; while they multiply a
// half of a step, the next half's codes are converted.
//
// Order: products of 64 inputs are added by the tensor cores from 0, 16 at a time. Then sum = sum +
// scale x theirs, rounded once, over the halves of a split's steps in order, and over splits in
// order (rows_splits.cuh). So a result's bits depend on the weight's shape only.
#pragma once

#include <cuda.h>
#include <cutlass/arch/barrier.h>

#include <cstddef>
#include <cstdint>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <utility>

#include "core/cuda/early_start.cuh"
#include "gemm/cuda/coded_codes.cuh"
#include "gemm/cuda/coded_layout.h"
#include "gemm/cuda/gemm_tiles.cuh"
#include "gemm/cuda/rows_instructions.cuh"
#include "gemm/cuda/rows_splits.cuh"

namespace tandem::gpu::coded {

using rows::Params, rows::Work;

/// kRows: of x; kWeightRows: of the weight, a multiple of 64; kBlocks: of an SM.
template <int kRows_, int kWeightRows_, int kStages_, int kBlocks_>
struct Tile {
  static constexpr int kRows = kRows_, kStages = kStages_, kBlocks = kBlocks_;
  static constexpr int kWeightRows = kWeightRows_, kWarps = kWeightRows / 16;
  static constexpr int kMultiplying = kWarps * 32, kThreads = kMultiplying + 32;
  static constexpr int kSums = kRows / 2;  // of a thread
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

/// Descriptor of the operand 16 i inputs further. Its upper word stays as it is.
__device__ inline uint64_t further(uint64_t descriptor, int i) {
  return (descriptor & ~uint64_t{UINT32_MAX}) |
         (uint32_t(descriptor) + uint32_t(i) * uint32_t(fused::k_stride(false)));
}

template <class T, size_t... i>
__device__ void multiply(float (&sums)[T::kSums], const CodePairs& upper, const CodePairs& lower,
                         uint64_t x, bool first, std::index_sequence<i...>) {
  rows::Instructions<T::kRows>::OfRegisters::fma(
      upper.first, lower.first, upper.last, lower.last, x, sums[i]...,
      first ? cute::SM90::GMMA::ScaleOut::Zero : cute::SM90::GMMA::ScaleOut::One);
}

/// Half a step's 16 rows of a warp as bf16: a thread's pairs of two rows.
struct HalfStep {
  CodePairs upper[4], lower[4];
};

/// A warp's sums of its 16 rows of the weight and all rows of x.
template <class T, WeightFormat kFormat>
class Multiplier {
  using Codes = DeviceCodes<kFormat>;

 public:
  __device__ explicit Multiplier(typename T::Shared& shared)
      : shared_(shared), row_(int(threadIdx.x) / 32 * 16 + int(threadIdx.x) % 32 / 4) {}

  /// `steps` is positive.
  __device__ void run(int steps) {
    await();
    start(convert(0), 0);
#pragma unroll 1
    for (int step = 1; step < steps; ++step) {
      HalfStep next = convert(1);
      add(scales_[0], scales_[1], 0);
      start(next, 1);
      const int previous = state_.index;
      const uint32_t upper = scales_[0], lower = scales_[1];
      state_.advance();
      await();
      next = convert(0);
      add(upper, lower, 1);
      start(next, 0);
      release(previous);
    }
    const HalfStep last = convert(1);
    add(scales_[0], scales_[1], 0);
    start(last, 1);
    add(scales_[0], scales_[1], 1);
  }

  /// Leaves the sums in shared memory, by row of x.
  __device__ void write() {
    rows::write_sums<T>(shared_, sums_);
  }

 private:
  /// Waits for the next stage.
  __device__ void await() {
    shared_.full[state_.index].wait(state_.phase);
    asm volatile("" ::: "memory");  // the wait does not keep reads after it
    const auto& scales = shared_.stages.scales[state_.index];
    scales_[0] = scales[row_], scales_[1] = scales[row_ + 8];
  }
  __device__ HalfStep convert(int half) {
    const int vector = int(threadIdx.x) % 4 * 2 + half;
    const std::byte* const codes = shared_.stages.codes[state_.index];
    const uint4 upper = vector_at(codes, row_, vector), lower = vector_at(codes, row_ + 8, vector);
    return {{Codes::pairs(upper.x), Codes::pairs(upper.y), Codes::pairs(upper.z),
             Codes::pairs(upper.w)},
            {Codes::pairs(lower.x), Codes::pairs(lower.y), Codes::pairs(lower.z),
             Codes::pairs(lower.w)}};
  }
  /// Keeps the conversion of codes before the instructions that follow.
  __device__ static void fence(CodePairs& pairs) {
    cute::warpgroup_fence_operand(pairs.first);
    cute::warpgroup_fence_operand(pairs.last);
  }
  /// Starts the products of half a step, four times 16 inputs.
  __device__ void start(HalfStep codes, int half) {
    const uint64_t x =
        fused::operand_descriptor(fused::address_of(shared_.stages.x[state_.index][half]));
    fused::fence_sums(products_);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      fence(codes.upper[i]);
      fence(codes.lower[i]);
    }
    cute::warpgroup_arrive();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      multiply<T>(products_, codes.upper[i], codes.lower[i], further(x, i), i == 0,
                  std::make_index_sequence<size_t(T::kSums)>{});
    }
    cute::warpgroup_commit_batch();
  }
  /// Waits for the products of half a step, and adds them by these words of scales.
  __device__ void add(uint32_t upper, uint32_t lower, int half) {
    const float scales[] = {Codes::scale(upper, half), Codes::scale(lower, half)};
    cute::warpgroup_wait<0>();
    fused::fence_sums(products_);
#pragma unroll
    for (int i = 0; i < T::kSums; ++i) {
      sums_[i] = __fmaf_rn(scales[i / 2 % 2], products_[i], sums_[i]);
    }
  }
  __device__ void release(int stage) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) shared_.empty[stage].arrive();
  }

  typename T::Shared& shared_;
  int row_;  ///< of the weight in the tile, and the one 8 further
  fused::PipelineState<T::kStages> state_;
  uint32_t scales_[2];  ///< words of the rows in this stage
  float sums_[T::kSums] = {}, products_[T::kSums];
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
