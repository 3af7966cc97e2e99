// Engine of the hand-written persistent Hopper GEMMs: the code of a block, independent of the
// source of its operands and the destination of its tiles. A block is three warpgroups. Two
// multiply, each 64 rows of a tile. In the third, warp 0 loads, warps 2 and 3 store, and warp 1 is
// the helper warp. Blocks may work in pairs (clusters) whose tiles have the same columns: each
// loads half of the weight's rows for both.
//
//   warp 0       Source      fills stages of a ring in shared memory (stage_filler.cuh)
//   warps 4-11   the engine  multiply them (multiplier.cuh); the sink's Tile takes the accumulators
//                            (staged_tile.cuh, encoded_tile.cuh)
//   warps 2, 3   Sink        copy finished tiles from shared memory to their destination
//                            (tile_storer.cuh)
//   warp 1       helper      everything else: gathers rows, copies shards, signals peers
//
// A work item is the unit of a cluster: a tile, or some of its k-blocks. Every role iterates over
// the same work items in the same order. A stage is a k-block of the work item (128 bytes along K
// of the operands), or 64 rows that are added to the accumulators. Only the work item defines the
// order of the stages; the loading thread and the multiplying warpgroups both follow it.
//
// The multiplying warpgroups never synchronize with each other: each waits for operands, releases
// them and writes its half of a tile independently, so that one may multiply while the other is in
// its epilogue. A finished tile is written and stored under the next one's main loop, 64 columns of
// a half at a time. Only a storing warp waits for memory, unless that takes so long that no buffer
// is free.
//
// `Roles` defines a kernel: fused_kernel.cuh, arriving_kernel.cuh, grouped_kernel.cuh and others.
// Members:
//   Tiles     a GemmTiles
//   Params    kernel parameters. With `partials`, a SplitPartials, a work item may cover only part
//             of a tile's K
//   Shared    a Tiles::Shared, plus other state that the warps share
//   Work      constructed from the parameters and an entry of `params.work_items`, a table with
//             `params.items_of_cluster` entries per cluster; the last one has end = 0.
//             Without a table: for_each_work(params, body). Members:
//     begin, end, writes_partial, reads_partials, partial    its k-blocks (schedule/wave_split.h)
//     added(), steps_before(i)   number of stages that add rows, and of k-blocks before stage i
//     tile_coord()               row and column of its tile, for a timeline
//   open(params, shared)         called by all threads before any role starts
//   spare(params, shared)        called by warp 1
//   close()                      called by all threads at the end
//   Source    loading thread. Constructed from (params, shared)
//     kCopyingLanes              threads of the helper warp whose cp.async also fills stages
//     begin(work)
//     load_step(stages, work, i) loads k-block i in stage order, after waiting for its inputs
//     load_added(stages, work, i)   loads the rows of added stage i, if work items add any
//     end(work), close()
//     waiter()                   with `partials`: Waiter (deadline and rank) for them
//     scales(params, work)       e4m3: TileScales or similar; called by the multiplying threads
//   Sink      storing threads, one per half of a tile. Constructed from (params, shared, group)
//     Tile                       converts the accumulators: RoundedTile or similar
//     write_step(work, group, box)   k-block under which a box of the previous tile is written:
//                                in increasing order, all before the first stage that adds rows
//     finish(params, work, sums, lane)   further processing of the accumulators
//     kLooksAhead, look_ahead(work, next)   if true, called before `work` is stored;
//                                `next.end` is 0 after the last one
//     store(storer, work)        stores half a tile; the engine stores partials. Tiles without
//                                buffers are not stored: their Tile writes them to memory
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/cluster_sm90.hpp>
#include <type_traits>

#include "gemm/cuda/multiplier.cuh"
#include "gemm/cuda/split_partials.cuh"
#include "gemm/cuda/stage_filler.cuh"
#include "gemm/cuda/tile_storer.cuh"
#include "gemm/cuda/tile_timeline.cuh"

namespace tandem::gpu::fused {

/// Base of work items to whose tiles only partials are added.
struct NothingAdded {
  static constexpr int added() { return 0; }
  static constexpr int steps_before(int) { return 0; }
};
/// Base of work items that are whole tiles.
struct WholeTile : NothingAdded {
  static constexpr int begin = 0, reads_partials = 0, partial = 0;
  static constexpr bool writes_partial = false;
};

/// Base of sinks that only store.
struct DirectSink {
  static constexpr bool kLooksAhead = false;
  template <class Params, class Work, size_t kSums>
  __device__ static void finish(const Params&, const Work&, float (&)[kSums], int) {}
};

template <class Roles>
struct GemmBlock {
  using Tiles = typename Roles::Tiles;
  using Params = typename Roles::Params;
  using Shared = typename Roles::Shared;
  using Work = typename Roles::Work;
  using Source = typename Roles::Source;
  using Sink = typename Roles::Sink;
  using Partials = SplitPartials<Tiles>;

  static constexpr int kCluster = Tiles::kCluster, kGroups = Tiles::kGroups;
  static constexpr int kThreads = 128 * (1 + kGroups);
  /// Registers per thread after setmaxnreg; in total at most the 168 per thread that the block
  /// starts with: 65,536 by 384 threads, rounded down to a multiple of 8. The loading warps spilled
  /// with fewer than 72; that leaves 216 for each multiplying thread, of which accumulators and
  /// staged tile take 192 (bf16).
  static constexpr int kLoadingRegisters = 72, kMultiplyingRegisters = 216;
  static_assert(kLoadingRegisters + kGroups * kMultiplyingRegisters <= 168 * (1 + kGroups));
  static constexpr int kSharedBytes = int(sizeof(Shared)) + 1024;
  static_assert(kSharedBytes <= 227 * 1024);
  static constexpr bool kSplits = requires(const Params& params) { params.partials; };
  static constexpr bool kHasTable = requires(const Params& params) { params.work_items; };
  static constexpr bool kStores = Tiles::kBuffers > 0;
  static constexpr bool kAdds = !std::is_base_of_v<NothingAdded, Work>;

  /// Calls `body(work)`, or `body(work, next)` with `next.end` = 0 after the last work item.
  template <class Body>
  __device__ static void for_each_work(const Params& params, Body&& body) {
    if constexpr (!kHasTable) {
      Roles::for_each_work(params, body);
    } else {
      const auto* at = params.work_items + blockIdx.x / kCluster * params.items_of_cluster;
      for (; at->end != 0; ++at) {
        asm volatile("prefetch.global.L1 [%0];" ::"l"(at + 1));
        if constexpr (std::is_invocable_v<Body, const Work&>) {
          body(Work(params, *at));
        } else {
          body(Work(params, *at), Work(params, at[1]));
        }
      }
    }
  }

  // ---- Loading thread ---------------------------------------------------------------------------

  __device__ static void load(const Params& params, Shared& shared) {
    StageFiller<Tiles> stages(shared);
    Source source(params, shared);
    for_each_work(params, [&](const Work& work) {
      source.begin(work);
      int step = 0;
      const auto load_until = [&](int until) {
#pragma unroll 1
        for (; step < until; ++step) source.load_step(stages, work, step);
      };
#pragma unroll 1
      for (int i = 0; i < work.added(); ++i) {
        load_until(work.steps_before(i));
        if constexpr (kAdds) source.load_added(stages, work, i);
      }
      load_until(work.end - work.begin);
      source.end(work);
      if constexpr (kSplits) load_partials(stages, params.partials, work, source.waiter());
    });
    source.close();
  }

  // ---- Multiplying warpgroups -------------------------------------------------------------------

  __device__ static void multiply(const Params& params, Shared& shared, int group) {
    const GroupThread at(group);
    const Timestamps timestamps(params);
    using Product = Multiplier<Tiles, (Source::kCopyingLanes > 0)>;
    typename Product::Sums sums;
    typename Product::ShortSums short_sums;
    Product product(shared, at, sums, short_sums);
    typename Sink::Tile::Words staged;
    typename Sink::Tile tile(shared, at, staged);  // the previous tile
    for_each_work(params, [&](const Work& work) {
      // A tile that is split along K is recorded by the block that has its first k-blocks.
      const bool records = at.thread == 0 && at.group == 0 && !work.writes_partial;
      const auto issue = [&](bool first) {
        product.await();
        if (first) timestamps.stamp(work.tile_coord(), records, &TileRecord::product_begin);
        product.issue(first);
      };
      product.begin();
      const int steps = work.end - work.begin;
      // First k-blocks, under which the previous tile is written for its store.
      int step = 0;
#pragma unroll
      for (int box = 0; box < Tiles::kBoxes; ++box) {
        const int written_at = Sink::write_step(work, group, box);
#pragma unroll 1
        for (; step < written_at; ++step) {
          issue(step == 0);
          product.retire_previous();
        }
        issue(step == 0);
        if (tile.is_waiting()) tile.write_box(box);
        product.retire_previous();
        ++step;
      }
      // Remaining k-blocks; rows are added between them, and partials after all of them.
      const int added = work.added(), all_added = added + work.reads_partials * Partials::kSteps;
#pragma unroll 1
      for (int i = 0;; ++i) {
        const int until = i < added ? work.steps_before(i) : steps;
#pragma unroll 1
        for (; step < until; ++step) {
          issue(!kStores && step == 0);
          product.retire_previous();
        }
        if constexpr (Tiles::Product::kFp8) {
          if (i == 0) {
            product.promote();
            scale_sums(sums, Source::scales(params, work),
                       group * Tiles::kGroupRows + 16 * at.warp + at.lane / 4, at.lane);
          }
        }
        if (i == all_added) break;
        if constexpr (kAdds || kSplits) {
          product.add_rows(
              i % Tiles::kStepsOfRows == group,
              [&](auto& sums, const std::byte* rows) { tile.add(sums, rows, i < added); });
        }
      }
      timestamps.stamp(work.tile_coord(), records, &TileRecord::product_end);
      timestamps.processor(work.tile_coord(), records);
      product.retire_all();
      Sink::finish(params, work, sums, at.lane);
      tile.take(params, work, sums);
    });
    if (tile.is_waiting()) {
#pragma unroll
      for (int box = 0; box < Tiles::kBoxes; ++box) tile.write_box(box);
    }
  }

  // ---- Storing threads --------------------------------------------------------------------------

  __device__ static void store(const Params& params, Shared& shared, int group) {
    TileStorer<Tiles> storer(shared, group);
    Sink sink(params, shared, group);
    const auto store_work = [&](const Work& work) {
      if constexpr (kSplits) {
        if (work.writes_partial) return store_partial(storer, params.partials, work);
      }
      sink.store(storer, work);
    };
    if constexpr (Sink::kLooksAhead) {
      for_each_work(params, [&](const Work& work, const Work& next) {
        sink.look_ahead(work, next);
        store_work(work);
      });
    } else {
      for_each_work(params, store_work);
    }
  }

  // ---- Block ------------------------------------------------------------------------------------

  __device__ static void run(const Params& params, std::byte* memory) {
    Shared& shared = aligned(memory);
    Roles::open(params, shared);
    const int warp = __shfl_sync(0xffffffff, int(threadIdx.x) / 32, 0);
    if (threadIdx.x == 0) Tiles::open(shared, 1 + Source::kCopyingLanes);
    synchronize();
    if (warp < 4) {
      cutlass::arch::warpgroup_reg_dealloc<kLoadingRegisters>();
      if (warp == 0 && cute::elect_one_sync()) load(params, shared);
      if (warp == 1) Roles::spare(params, shared);
      if constexpr (kStores) {
        if (warp >= 2 && cute::elect_one_sync()) store(params, shared, warp - 2);
      }
      __syncwarp();
    } else {
      cutlass::arch::warpgroup_reg_alloc<kMultiplyingRegisters>();
      multiply(params, shared, warp / 4 - 1);
    }
    // Waits until the other block has released all stages here and has read all data loaded for it.
    // A cluster of one block without stores has nothing to wait for.
    if constexpr (kCluster > 1 || kStores) synchronize();
    Roles::close();
  }
  /// First 1024-byte aligned address in the block's dynamic shared memory.
  __device__ static Shared& aligned(std::byte* memory) {
    return *reinterpret_cast<Shared*>(memory + (1024 - address_of(memory) % 1024) % 1024);
  }
  __device__ static void synchronize() {
    if constexpr (kCluster == 1) return __syncthreads();
    cute::cluster_arrive();  // not relaxed
    cute::cluster_wait();
  }
};

}  // namespace tandem::gpu::fused
