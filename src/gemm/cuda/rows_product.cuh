// GEMM of few rows on Hopper: a block multiplies some rows of the weight, which are the rows of the
// tensor cores' tiles, by all rows of x, their columns. The weight streams through a ring of stages
// that holds enough bytes in flight; x, from the L2 cache, has its k-blocks in the same stages.
//
// The blocks of a cluster divide k (rows_splits.cuh).
//
// A result is a sum over k-blocks in order, in each split, and over splits: its bits depend on
// neither the number of rows nor the tile, but on the number of splits.
#pragma once

#include <cuda.h>
#include <cutlass/arch/barrier.h>

#include <cstddef>
#include <cstdint>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <type_traits>
#include <utility>

#include "core/cuda/early_start.cuh"
#include "gemm/cuda/gemm_tiles.cuh"
#include "gemm/cuda/rows_instructions.cuh"
#include "gemm/cuda/rows_splits.cuh"

namespace tandem::gpu::rows {

constexpr int kStep = 64;       // of k: 128 bytes, a k-block
constexpr int kGroupRows = 64;  // of the weight, multiplied by a warpgroup

/// kRows: of x; kWeightRows: of the weight, a multiple of kGroupRows; kBlocks: of an SM.
template <int kRows_, int kWeightRows_, int kStages_, int kBlocks_>
struct Tile {
  static constexpr int kRows = kRows_, kWeightRows = kWeightRows_, kStages = kStages_;
  static constexpr int kBlocks = kBlocks_;
  static constexpr int kGroups = kWeightRows / kGroupRows;
  static constexpr int kMultiplying = kGroups * 128, kThreads = kMultiplying + 32;
  static constexpr int kSums = kRows / 2;  // of a thread
  static constexpr uint32_t kRowBytes = kStep * 2;
  static constexpr uint32_t kWeightBytes = kWeightRows * kRowBytes, kXBytes = kRows * kRowBytes;
  /// Between the sums of two rows of x in shared memory, in floats: four lanes' writes, of eight
  /// rows of the weight each, are in all banks.
  static constexpr int kSumStride = kWeightRows + 4;

  struct Shared {
    struct Stages {
      alignas(1024) std::byte weight[kStages][kWeightBytes];
      alignas(1024) std::byte x[kStages][kXBytes];
    };
    union {
      Stages stages;
      float sums[kRows][kSumStride];  // once all stages are used
    };
    fused::FullBarrier full[kStages];
    fused::EmptyBarrier empty[kStages];
  };
};

template <class T, bool kSwiglu>
class Loader {
 public:
  __device__ Loader(typename T::Shared& shared, const CUtensorMap& weight, const CUtensorMap& x,
                    const Params& p, const Work<T, kSwiglu>& work)
      : shared_(shared), weight_(weight), x_(x), p_(p), work_(work) {}

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

  __device__ uint64_t* full(int stage) { return reinterpret_cast<uint64_t*>(&shared_.full[stage]); }
  __device__ void load_weight(int stage, int step) {
    shared_.full[stage].arrive_and_expect_tx(T::kWeightBytes + T::kXBytes);
    std::byte* const to = shared_.stages.weight[stage];
    const int at = (work_.begin + step) * kStep;
    cute::SM90_TMA_LOAD_2D::copy(&weight_, full(stage), kStreamed, to, at, work_.first_n);
    if constexpr (kSwiglu) {
      cute::SM90_TMA_LOAD_2D::copy(&weight_, full(stage), kStreamed, to + T::kWeightBytes / 2, at,
                                   p_.n + work_.first_n);
    }
  }
  __device__ void load_x(int stage, int step) {
    std::byte* const to = shared_.stages.x[stage];
    const int at = (work_.begin + step) * kStep;
    cute::SM90_TMA_LOAD_3D::copy(&x_, full(stage), kReused, to, at, 0, 0);
  }

  typename T::Shared& shared_;
  const CUtensorMap &weight_, &x_;
  const Params& p_;
  const Work<T, kSwiglu>& work_;
};

template <class T, size_t... i>
__device__ void multiply(float (&sums)[T::kSums], uint64_t weight, uint64_t x, bool first,
                         std::index_sequence<i...>) {
  Instructions<T::kRows>::OfShared::fma(
      weight, x, sums[i]...,
      first ? cute::SM90::GMMA::ScaleOut::Zero : cute::SM90::GMMA::ScaleOut::One);
}

/// A warpgroup's sums over `steps` k-blocks, which it leaves in registers.
template <class T>
__device__ void multiply_steps(typename T::Shared& shared, float (&sums)[T::kSums], int steps) {
  const int group = int(threadIdx.x) / 128;
  const auto release = [&](int stage) {
    if (threadIdx.x % 128 == 0) shared.empty[stage].arrive();
  };
  fused::PipelineState<T::kStages> state;
  int previous = -1;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    shared.full[state.index].wait(state.phase);
    const uint64_t weight = fused::operand_descriptor(
        fused::address_of(shared.stages.weight[state.index]) + group * kGroupRows * T::kRowBytes);
    const uint64_t x = fused::operand_descriptor(fused::address_of(shared.stages.x[state.index]));
    fused::fence_sums(sums);
    cute::warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < kStep / 16; ++k) {
      multiply<T>(sums, weight + k * fused::k_stride(false), x + k * fused::k_stride(false),
                  step + k == 0, std::make_index_sequence<size_t(T::kSums)>{});
    }
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<1>();
    if (previous >= 0) release(previous);
    previous = state.index;
    state.advance();
  }
  cute::warpgroup_wait<0>();
  fused::fence_sums(sums);
}

template <class T, typename Out, bool kSwiglu>
__global__ void __launch_bounds__(T::kThreads, T::kBlocks)
    kernel(const __grid_constant__ CUtensorMap weight, const __grid_constant__ CUtensorMap x,
           const Params p) {
  extern __shared__ std::byte memory[];
  auto& shared = *reinterpret_cast<typename T::Shared*>(
      memory + (1024 - fused::address_of(memory) % 1024) % 1024);
  const Work<T, kSwiglu> work(p);
  if (threadIdx.x == 0) {
    for (int i = 0; i < T::kStages; ++i) {
      shared.full[i].init(1);
      shared.empty[i].init(T::kGroups);
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  let_next_start();
  if (threadIdx.x >= T::kMultiplying) {
    if (threadIdx.x == T::kMultiplying) Loader<T, kSwiglu>(shared, weight, x, p, work).run();
    __syncwarp();
    wait_for_previous();
  } else {
    wait_for_previous();
    float sums[T::kSums] = {};
    multiply_steps<T>(shared, sums, work.end - work.begin);
    // All warpgroups have read the stages that the sums replace.
    cutlass::arch::NamedBarrier::sync(T::kMultiplying, 1);
    write_sums<T>(shared, sums);
  }
  sync_cluster();
  add_splits<T, Out, kSwiglu>(shared, p, work);
  if (p.splits > 1) sync_cluster();  // others may still read these sums
}

/// Shared memory of a block, with room to align it.
template <class T>
constexpr size_t kSharedBytes = sizeof(typename T::Shared) + 1024;

}  // namespace tandem::gpu::rows
