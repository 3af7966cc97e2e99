// Epilogue of GEMMs of few rows on Hopper whose blocks multiply rows of the weight
// (rows_product.cuh, coded_product.cuh).
//
// Splits: the blocks of a cluster divide k. Each leaves its sums in its shared memory, and reads
// the others' there to add a share of them in order.
#pragma once

#include <cstdint>

#include "core/cuda/element.cuh"
#include "core/cuda/silu.cuh"

namespace tandem::gpu::rows {

constexpr int kMaxSplits = 8;

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

/// Waits for all threads of the cluster. Names memory, as cute::cluster_sync does not: without that
/// the compiler may move reads and writes of sums across it.
__device__ inline void sync_cluster() {
  asm volatile("barrier.cluster.arrive.aligned;\n barrier.cluster.wait.aligned;" ::: "memory");
}

/// Leaves a thread's sums, as the tensor cores have them, in shared memory by row of x.
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

}  // namespace tandem::gpu::rows
