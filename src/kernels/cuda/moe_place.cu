#include "kernels/cuda/moe_place.h"

#include <algorithm>
#include <string>

#include "core/cuda/check.h"
#include "core/cuda/load_module.cuh"
#include "core/cuda/share.h"
#include "tandem/error.h"

namespace tandem::gpu {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32, kPerThread = 4;
static_assert(kMostExperts <= kThreads);  // a thread counts the tiles of one

__global__ void __launch_bounds__(kThreads) count_kernel(MoePlacing p) {
  __shared__ int32_t counts[kMostExperts];
  for (int e = int(threadIdx.x); e < p.groups; e += kThreads) counts[e] = 0;
  __syncthreads();
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < p.choices; i += step) {
    const int expert = p.experts[i], group = expert - p.first;
    if (expert < 0 || expert >= p.all_experts) atomicAdd(p.refused, 1);
    if (group >= 0 && group < p.groups) {
      atomicAdd(&counts[group], 1);
    } else {
      p.place[i] = -1;
    }
  }
  __syncthreads();
  for (int e = int(threadIdx.x); e < p.groups; e += kThreads) {
    if (counts[e] != 0) atomicAdd(p.counts + e, counts[e]);
  }
}

/// The sum of the threads before this one, and of all.
struct Scan {
  int before, all;
};
__device__ Scan scan_block(int value) {
  __shared__ int of_warps[kWarps];
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  int until = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, until, step);
    if (lane >= step) until += other;
  }
  __syncthreads();  // the last scan has been read
  if (lane == 31) of_warps[warp] = until;
  __syncthreads();
  int sum = of_warps[lane];
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  const int warps_before = warp == 0 ? 0 : __shfl_sync(~0u, sum, warp - 1);
  return {warps_before + until - value, __shfl_sync(~0u, sum, 31)};
}

__device__ void write_works(const GroupedTable& table, int group, int tiles_before, int row_tiles,
                            int all_row_tiles) {
  using namespace schedule;
  const int first = tiles_before * table.column_tiles, tiles = row_tiles * table.column_tiles;
  const auto work = [&](BlockTurn turn) -> GroupedWork& {
    return table.works[turn.block * table.works_of_block + turn.turn];
  };
  for (int at = int(threadIdx.x); at < tiles; at += kThreads) {
    const Tile tile = grouped_tile(at, row_tiles, table.column_tiles, kGroupedBand);
    work(turn_of(first + at, table.blocks)) = {tiles_before + tile.row, tile.column, group,
                                               table.steps};
  }
  const int all = all_row_tiles * table.column_tiles;
  for (int b = int(blockIdx.x) + int(threadIdx.x) * int(gridDim.x); b < table.blocks;
       b += kThreads * int(gridDim.x)) {
    work({b, turns_of(b, all, table.blocks)}) = {};
  }
}

// A block takes a group.
__global__ void __launch_bounds__(kThreads) place_kernel(MoePlacing p) {
  const int group = int(blockIdx.x), thread = int(threadIdx.x);
  const auto tiles_of = [&](int g) {
    return g < p.groups ? schedule::group_tiles(p.counts[g], kGroupedRows) : 0;
  };
  const Scan tiles = scan_block(tiles_of(thread));
  __shared__ int tiles_before;
  if (thread == group) tiles_before = tiles.before;
  __syncthreads();
  const int row_tiles = tiles_of(group), begin = tiles_before * kGroupedRows;
  const int expert = p.first + group;
  int placed = 0;
  for (int64_t i = 0; i < p.choices; i += kThreads * kPerThread) {
    const int64_t at = i + thread * kPerThread;
    bool mine[kPerThread];
    int count = 0;
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      mine[k] = at + k < p.choices && p.experts[at + k] == expert;
      count += mine[k];
    }
    const Scan scan = scan_block(count);
    int place = begin + placed + scan.before;
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      if (!mine[k]) continue;
      p.source[place] = int32_t((at + k) / p.top_k);
      p.place[at + k] = place++;
    }
    placed += scan.all;
  }
  for (int row = placed + thread; row < row_tiles * kGroupedRows; row += kThreads) {
    p.source[begin + row] = -1;
  }
  for (int i = 0; i < p.table_count; ++i) {
    write_works(p.tables[i], group, tiles_before, row_tiles, tiles.all);
  }
}

void check_placing(const MoePlacing& p) {
  if (p.groups < 1 || p.groups > kMostExperts) {
    throw InvalidArgument("experts on a GPU: " + std::to_string(p.groups) + ": expected 1 to " +
                          std::to_string(kMostExperts));
  }
}

}  // namespace

void launch_place(const MoePlacing& placing, cudaStream_t stream) {
  check_placing(placing);
  check(cudaMemsetAsync(placing.counts, 0, size_t(placing.groups) * sizeof(int32_t), stream),
        "clear the experts' counts");
  const int64_t blocks = (placing.choices + kThreads - 1) / kThreads;
  count_kernel<<<unsigned(std::clamp<int64_t>(blocks, 1, this_share()->blocks(132))), kThreads, 0,
                 stream>>>(placing);
  check_launch("count_kernel");
  place_kernel<<<unsigned(placing.groups), kThreads, 0, stream>>>(placing);
  check_launch("place_kernel");
}

}  // namespace tandem::gpu
