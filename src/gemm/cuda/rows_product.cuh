// GEMM of few rows on Hopper: a block multiplies some rows of the weight, which are the rows of the
// tensor cores' tiles, by all rows of x, their columns. The weight streams through a ring of stages
// that holds enough bytes in flight; x, from the L2 cache, has its k-blocks in the same stages.
//
// Splits: the blocks of a cluster divide k. Each leaves its sums in its shared memory, and reads
// the others' there to add a share of them in order.
//
// A result is a sum over k-blocks in order, in each split, and over splits: its bits depend on
// neither the number of rows nor the tile, but on the number of splits.
#pragma once

#include <cuda.h>
#include <cutlass/arch/barrier.h>

#include <cstddef>
#include <cstdint>
#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <type_traits>
#include <utility>

#include "core/cuda/early_start.cuh"
#include "core/cuda/element.cuh"
#include "core/cuda/silu.cuh"
#include "gemm/cuda/gemm_tiles.cuh"

namespace tandem::gpu::rows {

constexpr int kMaxSplits = 8;
constexpr int kStep = 64;       // of k: 128 bytes, a k-block
constexpr int kGroupRows = 64;  // of the weight, multiplied by a warpgroup

template <int kRows>
struct Product;
template <>
struct Product<8>
    : cute::SM90::GMMA::MMA_64x8x16_F32BF16BF16_SS<fused::major_of(false), fused::major_of(false)> {
};
template <>
struct Product<16> : cute::SM90::GMMA::MMA_64x16x16_F32BF16BF16_SS<fused::major_of(false),
                                                                   fused::major_of(false)> {};
template <>
struct Product<32> : cute::SM90::GMMA::MMA_64x32x16_F32BF16BF16_SS<fused::major_of(false),
                                                                   fused::major_of(false)> {};
template <>
struct Product<64> : cute::SM90::GMMA::MMA_64x64x16_F32BF16BF16_SS<fused::major_of(false),
                                                                   fused::major_of(false)> {};

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

struct Params {
  void* out;
  int64_t out_stride;
  int m, n, steps;  ///< n: columns of out
  int splits;
  bool accumulate;
  bool vectors;  ///< out's rows are in fours at multiples of four elements
};

/// A block's tile and range of k-blocks.
template <class T, bool kSwiglu>
struct Work {
  static constexpr int kColumns = kSwiglu ? T::kWeightRows / 2 : T::kWeightRows;  // of out
  int split, first_n, begin, end;

  __device__ explicit Work(const Params& p) {
    split = int(blockIdx.x) % p.splits;
    first_n = int(blockIdx.x) / p.splits * kColumns;
    begin = p.steps * split / p.splits;
    end = p.steps * (split + 1) / p.splits;
  }
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
  Product<T::kRows>::fma(
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

/// Leaves a warpgroup's sums in shared memory, by row of x.
template <class T>
__device__ void write_sums(typename T::Shared& shared, const float (&sums)[T::kSums]) {
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
#pragma unroll
  for (int i = 0; i < T::kSums; ++i) {
    const int row = i / 4 * 8 + lane % 4 * 2 + i % 2, column = warp * 16 + lane / 4 + i % 4 / 2 * 8;
    shared.sums[row][column] = sums[i];
  }
}

struct Four {
  float of[4];
};

/// Sum of all splits' results, in order, in row `row` of x from column `column` of the tile on.
template <class T>
__device__ Four sum_of_splits(typename T::Shared& shared, int splits, int row, int column) {
  float4 found[kMaxSplits];
#pragma unroll
  for (int i = 0; i < kMaxSplits; ++i) {
    if (i >= splits) break;
    const void* const from = __cluster_map_shared_rank(&shared.sums[row][column], unsigned(i));
    found[i] = *static_cast<const float4*>(from);
  }
  Four sum{found[0].x, found[0].y, found[0].z, found[0].w};
#pragma unroll
  for (int i = 1; i < kMaxSplits; ++i) {
    if (i >= splits) break;
    sum = {sum.of[0] + found[i].x, sum.of[1] + found[i].y, sum.of[2] + found[i].z,
           sum.of[3] + found[i].w};
  }
  return sum;
}

template <typename Out>
struct alignas(4 * sizeof(Out)) FourOf {
  Out of[4];
};

template <typename Out>
__device__ void store(const Params& p, Four values, int64_t row, int column) {
  Out* const to = static_cast<Out*>(p.out) + row * p.out_stride + column;
  FourOf<Out> stored;
  if (p.vectors) {
    auto* const all = reinterpret_cast<FourOf<Out>*>(to);
    if (p.accumulate) {
      stored = *all;
#pragma unroll
      for (int e = 0; e < 4; ++e) values.of[e] += to_float(stored.of[e]);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) stored.of[e] = from_float<Out>(values.of[e]);
    *all = stored;
    return;
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if (column + e >= p.n) break;
    to[e] = from_float<Out>(p.accumulate ? values.of[e] + to_float(to[e]) : values.of[e]);
  }
}

/// Adds the splits' sums of this block's share of the tile, and stores them.
template <class T, typename Out, bool kSwiglu>
__device__ void add_splits(typename T::Shared& shared, const Params& p,
                           const Work<T, kSwiglu>& work) {
  constexpr int kVectors = Work<T, kSwiglu>::kColumns / 4;
  const int total = p.m * kVectors, end = total * (work.split + 1) / p.splits;
  for (int i = total * work.split / p.splits + int(threadIdx.x); i < end; i += T::kThreads) {
    const int row = i / kVectors, column = i % kVectors * 4;
    if (work.first_n + column >= p.n) continue;
    Four sum = sum_of_splits<T>(shared, p.splits, row, column);
    if constexpr (kSwiglu) {
      const Four up = sum_of_splits<T>(shared, p.splits, row, column + T::kWeightRows / 2);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float gate = to_float(from_float<Out>(sum.of[e]));
        sum.of[e] = gate * sigmoid(gate) * to_float(from_float<Out>(up.of[e]));
      }
    }
    store<Out>(p, sum, row, work.first_n + column);
  }
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
  cute::cluster_sync();
  add_splits<T, Out, kSwiglu>(shared, p, work);
  if (p.splits > 1) cute::cluster_sync();  // others may still read these sums
}

/// Shared memory of a block, with room to align it.
template <class T>
constexpr size_t kSharedBytes = sizeof(typename T::Shared) + 1024;

}  // namespace tandem::gpu::rows
