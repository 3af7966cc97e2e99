#include "overlap/moe/cuda/permute.h"

#include <algorithm>
#include <string>

#include "core/cuda/check.h"
#include "core/cuda/load_module.cuh"
#include "core/cuda/share.h"
#include "gemm/cuda/grouped_arrivals.cuh"
#include "schedule/moe.h"
#include "tandem/error.h"

namespace tandem::gpu {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32, kPerThread = 4;
constexpr int kMaxRowTiles = 2;          // per work item
static_assert(kMaxExperts <= kThreads);  // a thread counts the tiles of one expert

/// Placeholder for a choice's position until it has one: an expert id is read once, since a
/// timed-out rank may overwrite it later.
__device__ int position_in(int group) {
  return -2 - group;
}

// One row of blocks per source.
__global__ void __launch_bounds__(kThreads) count_kernel(MoePermutation p) {
  __shared__ int32_t counts[kMaxExperts];
  for (int e = int(threadIdx.x); e < p.groups; e += kThreads) counts[e] = 0;
  __syncthreads();
  const int64_t first = blockIdx.y * p.routings, step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < p.routings; i += step) {
    const int expert = p.experts[first + i], group = expert - p.first;
    if (p.dropped && (expert < 0 || expert >= p.all_experts)) atomicAdd(p.dropped, 1);
    const bool here = group >= 0 && group < p.groups;
    if (here) atomicAdd(&counts[group], 1);
    p.position[first + i] = here ? position_in(group) : -1;
  }
  __syncthreads();
  for (int e = int(threadIdx.x); e < p.groups; e += kThreads) {
    if (counts[e] != 0) atomicAdd(p.counts + int(blockIdx.y) * p.groups + e, counts[e]);
  }
}

/// Sum over the threads before this one, and over all.
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

/// Rows of work items of a group in the same stage of a table, and those before them. A row of work
/// items has as many row tiles as the table's items.
struct Segment {
  int first, count;  ///< within the group
  int before;        ///< earlier ones in the table
};

/// Partition of a group's rows for tables whose work items have the same number of row tiles.
struct Cut {
  int before, count;     ///< rows of work items of the previous groups, and of this one
  int all, local_tiles;  ///< tiles of all groups; those with only local rows
  Segment staged;        ///< rows of this group that wait for one source and no later one
};

/// Called by all threads, one per group: `rows` of it, of which `local_rows` are local, `before`
/// come from sources before this one and `until` from sources up to it.
__device__ Cut cut_rows(int row_tiles, int rows, int local_rows, int before, int until) {
  const int tile_rows = row_tiles * kGroupedRows, count = schedule::group_tiles(rows, tile_rows);
  const int staged_before = schedule::arrived_tiles(before, rows, tile_rows),
            staged = schedule::arrived_tiles(until, rows, tile_rows) - staged_before;
  const Scan all = scan_block(count), earlier = scan_block(staged_before),
             here = scan_block(staged),
             of_local = scan_block(schedule::arrived_tiles(local_rows, rows, tile_rows));
  return {
      all.before, count, all.all, of_local.all, {staged_before, staged, earlier.all + here.before}};
}

/// The segment of a group's rows from the source at `step` that a table takes, and its total.
struct Taken {
  Segment segment;
  int all;
};
__device__ Taken taken_by(const GroupedTable& table, const Cut& cut, int step, int last) {
  Segment segment = cut.staged;
  switch (table.tiles) {
    case GroupedTiles::local:
      if (step > 0) segment.count = 0;
      return {segment, cut.local_tiles};
    case GroupedTiles::remote:
      if (step == 0) segment.count = 0;
      segment.before -= cut.local_tiles;
      return {segment, cut.all - cut.local_tiles};
    case GroupedTiles::all:
      break;
  }
  if (!table.staged) segment = {0, step == last ? cut.count : 0, cut.before};
  return {segment, cut.all};
}

/// Called by all threads; the last block waits until the kernel concurrent with the permutation has
/// begun. Bounded by: the deadline; after that, the call's own waits report what is missing.
__device__ void await_senders(const MoePermutation::Senders& senders) {
  if (senders.blocks == 0) return;
  __syncthreads();
  if (threadIdx.x != 0 || atomicAdd(senders.permuted, 1) != gridDim.x - 1) return;
  *senders.permuted = 0;
  await_blocks(senders.begun, senders.blocks, senders.deadline);
  *senders.begun = 0;
}

/// For a group whose first row tile is `first_tile` and that has `row_tiles`.
__device__ void write_work_items(const GroupedTable& table, int group, int stage, int first_tile,
                                 int row_tiles, const Taken& taken,
                                 const schedule::BlockSlots& slots) {
  using namespace schedule;
  const Segment& segment = taken.segment;
  const int first = segment.before * table.column_tiles, tiles = segment.count * table.column_tiles;
  const auto work = [&](BlockSlot slot) -> GroupedWork& {
    return table.work_items[slot.block * table.items_of_block + slot.slot];
  };
  for (int at = int(threadIdx.x); at < tiles; at += kThreads) {
    const Tile tile =
        grouped_tile(at, segment.count, table.column_tiles, kGroupedBand / table.row_tiles);
    const int row = (segment.first + tile.row) * table.row_tiles;
    const auto rows = int16_t(min(table.row_tiles, row_tiles - row));
    work(slot_of(first + at, slots)) = {
        first_tile + row, rows,           int16_t(table.first_column + tile.column),
        int16_t(group),   int16_t(stage), table.steps};
    if (table.order && tile.column == 0) {
      table.order[kOrderHead + segment.before + tile.row] = {first_tile + row, rows,
                                                             int16_t(stage)};
    }
  }
  if (table.order && blockIdx.x == 0 && threadIdx.x < kOrderHead) {
    table.order[threadIdx.x] = {threadIdx.x == 0 ? taken.all : 0};
  }
  const int all = taken.all * table.column_tiles;
  for (int b = int(blockIdx.x) + int(threadIdx.x) * int(gridDim.x); b < slots.blocks;
       b += kThreads * int(gridDim.x)) {
    work({b, slots_of(b, all, slots)}) = {};
  }
}

// One block per source and group.
__global__ void __launch_bounds__(kThreads) permute_kernel(MoePermutation p, int max_row_tiles) {
  const int group = int(blockIdx.x) / p.sources, step = int(blockIdx.x) % p.sources;
  const int thread = int(threadIdx.x), last = p.sources - 1;
  // Rows of group `thread`: local ones, from earlier sources, up to this source, all.
  int local_rows = 0, before = 0, until = 0, rows = 0;
  for (int s = 0; s <= last && thread < p.groups; ++s) {
    const int count = p.counts[schedule::moe_source(p.rank, p.sources, s) * p.groups + thread];
    local_rows += s == 0 ? count : 0;
    before += s < step ? count : 0;
    until += s <= step ? count : 0;
    rows += count;
  }
  struct Local {
    int rows, before;
    Cut cut[kMaxRowTiles];  // by row tiles of a work item, minus one
  };
  __shared__ Local local;
  if (thread == group) local.rows = rows, local.before = before;
  for (int row_tiles = 1; row_tiles <= max_row_tiles; ++row_tiles) {
    const Cut cut = cut_rows(row_tiles, rows, local_rows, before, until);
    if (thread == group) local.cut[row_tiles - 1] = cut;
  }
  __syncthreads();
  const int all_rows = scan_block(rows).all;
  const int leaving = p.leaving ? int(*p.leaving) : 0;
  const Cut& tiles = local.cut[0];
  const int begin = tiles.before * kGroupedRows;
  const int64_t first = schedule::moe_source(p.rank, p.sources, step) * p.routings;
  const int first_row = step == 0 ? p.local_row : int((step - 1) * (p.routings / p.top_k));
  int sorted = local.before;
  for (int64_t i = 0; i < p.routings; i += kThreads * kPerThread) {
    const int64_t at = i + thread * kPerThread;
    bool chosen[kPerThread];
    int count = 0;
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      chosen[k] = at + k < p.routings && p.position[first + at + k] == position_in(group);
      count += chosen[k];
    }
    const Scan scan = scan_block(count);
    int position = begin + sorted + scan.before;
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      if (!chosen[k]) continue;
      p.source[position] = first_row + int32_t((at + k) / p.top_k);
      if (p.routing_idx) p.routing_idx[position] = int32_t(first + at + k);
      p.position[first + at + k] = position++;
    }
    sorted += scan.all;
  }
  for (int row = local.rows + thread; step == last && row < tiles.count * kGroupedRows;
       row += kThreads) {
    p.source[begin + row] = -1;
    if (p.routing_idx) p.routing_idx[begin + row] = -1;
  }
  for (int tile = thread; p.ready && step == last && tile < tiles.count; tile += kThreads) {
    p.ready[tiles.before + tile] = 0;
  }
  if (p.group_rows && step == last && thread == 0) {
    p.group_rows[group] = {begin, local.rows};
    if (group == 0) p.group_rows[p.groups] = {tiles.all * kGroupedRows, 0};
  }
  for (int i = 0; i < p.table_count; ++i) {
    const GroupedTable& table = p.tables[i];
    const bool whole = !table.staged && table.tiles == GroupedTiles::all;
    const Taken taken = taken_by(table, local.cut[table.row_tiles - 1], step, last);
    schedule::BlockSlots slots = table.slots;
    if (table.joining.any()) {
      slots.rounds =
          table.joining.rounds(all_rows, leaving, taken.all * table.column_tiles, slots.early);
    }
    write_work_items(table, group, whole ? last : step, tiles.before, tiles.count, taken, slots);
  }
  await_senders(p.senders);
}

void check_permutation(const MoePermutation& p) {
  if (p.groups < 1 || p.groups > kMaxExperts) {
    throw InvalidArgument("experts on a GPU: " + std::to_string(p.groups) + ": expected 1 to " +
                          std::to_string(kMaxExperts));
  }
}

}  // namespace

void launch_permute(const MoePermutation& permutation, cudaStream_t stream) {
  check_permutation(permutation);
  check(cudaMemsetAsync(permutation.counts, 0,
                        size_t(permutation.sources) * size_t(permutation.groups) * sizeof(int32_t),
                        stream),
        "clear the experts' counts");
  const int64_t blocks = (permutation.routings + kThreads - 1) / kThreads;
  const int maximum = std::max(1, this_share()->blocks(132) / permutation.sources);
  const dim3 grid(unsigned(std::clamp<int64_t>(blocks, 1, maximum)), unsigned(permutation.sources));
  count_kernel<<<grid, kThreads, 0, stream>>>(permutation);
  check_launch("count_kernel");
  int max_row_tiles = 1;
  for (int i = 0; i < permutation.table_count; ++i) {
    max_row_tiles = std::max(max_row_tiles, permutation.tables[i].row_tiles);
  }
  permute_kernel<<<unsigned(permutation.groups * permutation.sources), kThreads, 0, stream>>>(
      permutation, max_row_tiles);
  check_launch("permute_kernel");
}

}  // namespace tandem::gpu
