// What a block of a hand-written persistent Hopper GEMM does, whatever its operands wait for and
// wherever its tiles go. It is three warpgroups: two multiply, each 64 rows of a tile of 128 x 256,
// or, of e4m3 codes, 128 x 128; of the third, warp 0 loads, warps 2 and 3 store, and warp 1 is
// free. Two blocks have two tiles of the same columns and share the weight's rows: each loads half
// of them for both.
//
// The multiplying warpgroups meet nowhere: each waits for operands, releases them and writes its
// half of a tile by itself, so that one may multiply while the other's tile leaves. A rounded tile
// leaves under steps of the next one, 64 columns of a half at a time, through kBuffers places in
// shared memory of 8 KiB for each warpgroup; a storing warp takes it from there, and it alone waits
// for memory, unless that takes so long that no place is free.
//
// What a cluster does is read from a table that the host made: `params.works` has
// `params.works_of_cluster` of them for every cluster, the last of which ends at 0. A `Work` is
// made from the parameters and an entry of the table, also the last one, and has
//   place()                            row and column of its tile, for a timeline
//   begin, end, writes_partial, reads_partials, partial
//                                      which steps along K (schedule/wave_split.h)
//   adding                             a schedule::AddingOrder: steps that add rows of another
//                                      matrix to the sums, in loads that count as steps; of codes
//                                      behind all others
//   leaves_at(group, box)              under which step a box of the tile before leaves: one after
//                                      the other, all before `adding.lead`
//   scales(params)                     of codes: TileScales
// An operator brings the loading thread's and the storing threads' loops, made of the parts here.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <type_traits>

#include "overlap/cuda/tensor_map.h"
#include "overlap/cuda/tile_timeline.cuh"
#include "overlap/cuda/wait_for_load.cuh"
#include "overlap/cuda/warpgroup_product.cuh"
#include "schedule/adding_order.h"

namespace tandem::gpu::fused {

/// `Element`: of the result, and of all that is added to it. `kOwnBytes`: of the operator's shared
/// memory.
template <class Operand, class Element, int kBuffers, int kOwnBytes>
struct ProductBlock {
  using Product = WarpgroupProduct<Operand>;
  using Full = cutlass::arch::ClusterTransactionBarrier;
  using Empty = cutlass::arch::ClusterBarrier;

  static constexpr int kTileRows = 128, kTileColumns = Product::kColumns, kGroupRows = 64;
  static constexpr int kGroups = 2, kCluster = 2;
  static constexpr int kStepOfK = fused::kStepOfK<Operand>;
  static constexpr int kThreads = 128 * (1 + kGroups);
  /// Registers of a thread after setmaxnreg; together no more than the block's 168 per thread.
  static constexpr int kLoadingRegisters = 72, kMultiplyingRegisters = 216;
  static_assert(kLoadingRegisters + kGroups * kMultiplyingRegisters <= 168 * (1 + kGroups));
  static constexpr int kBoxColumns = 128 / sizeof(Element);
  static constexpr int kBoxes = kTileColumns / kBoxColumns;  // of 64 rows
  static constexpr int kSixteens = kBoxColumns / 16;
  /// Steps of a tile from one box of the tile before that leaves to the next, at least, and the
  /// least steps under which all of them can. With a single place, the next box waits for a whole
  /// step longer until memory has taken the one before.
  static constexpr int kEvery = kBuffers == 1 ? 2 : 1, kLead = kBoxes * kEvery;
  static constexpr int kStepsOfRows = kTileRows / kGroupRows;  // that add a tile's rows
  static constexpr uint32_t kXBytes = kTileRows * kStepBytes;
  static constexpr uint32_t kWeightBytes = kTileColumns * kStepBytes;
  static constexpr int kSums = kGroupRows * kTileColumns / 128;  // that a thread keeps
  static constexpr uint32_t kBoxBytes = kGroupRows * kBoxColumns * sizeof(Element);
  static_assert(kBoxes * kBoxBytes <= kWeightBytes);
  // A block has 227 KiB of shared memory; barriers and alignment take less than two.
  static constexpr int kStages =
      ((227 - 2) * 1024 - kOwnBytes - kGroups * kBuffers * kBoxBytes) / (kXBytes + kWeightBytes);

  struct Shared {
    alignas(1024) std::byte x[kStages][kXBytes];
    alignas(1024) std::byte weight[kStages][kWeightBytes];
    alignas(1024) std::byte leaving[kGroups][kBuffers][kBoxBytes];
    Full full[kStages];
    Empty empty[kStages];
    Empty written[kGroups][kBuffers], taken[kGroups][kBuffers];
  };

  // Partial sums, in two terms, since one has fewer bits than they: by place and block of the
  // cluster.
  struct Partials {
    CUtensorMap map;
    uint64_t* count;  // by block, 0 between calls

    static constexpr int kTerms = 2, kSteps = kTerms * kStepsOfRows;
    static constexpr int row(int place, int term) { return (place * kTerms + term) * kTileRows; }
    __device__ static int place(int partial) {
      return partial * kCluster + int(cute::block_rank_in_cluster());
    }
  };

  // A place in a ring of barriers, and the phase in which it is.
  template <int kPlaces>
  struct Place {
    int at = 0;
    uint32_t phase = 0;
    __device__ void advance() {
      if (++at == kPlaces) at = 0, phase ^= 1;
    }
  };

  /// `body` takes a work, or a work and the next one, whose `end` is 0 behind the last.
  template <class Work, class Params, class Body>
  __device__ static void for_each_work(const Params& params, Body&& body) {
    const auto* at = params.works + blockIdx.x / kCluster * params.works_of_cluster;
    for (; at->end != 0; ++at) {
      asm volatile("prefetch.global.L1 [%0];" ::"l"(at + 1));
      if constexpr (std::is_invocable_v<Body, const Work&>) {
        body(Work(params, *at));
      } else {
        body(Work(params, *at), Work(params, at[1]));
      }
    }
  }

  // ---- The loading warp, one thread of it ------------------------------------------------------

  class Loader {
   public:
    __device__ explicit Loader(Shared& shared)
        : shared_(shared), half_(int(cute::block_rank_in_cluster())) {}

    /// Where along K a work's step is that is loaded as number `number`. Every other work goes
    /// backwards: what the one before read last is still in the cache.
    template <class Work>
    __device__ int step_of(const Work& work, int number) const {
      return backwards_ ? work.end - 1 - number : work.begin + number;
    }
    /// After each work.
    __device__ void turn() { backwards_ = !backwards_; }
    /// Along K: this block's rows of x, and its half of the cluster's columns.
    __device__ void load_step(const CUtensorMap& x, const CUtensorMap& weight, int step, int row,
                              int column) {
      constexpr uint16_t kBoth = (1 << kCluster) - 1;
      uint64_t* const full = begin(kXBytes + kWeightBytes);
      cute::SM90_TMA_LOAD_2D::copy(&x, full, kNormal, shared_.x[place_.at], step * kStepOfK, row);
      cute::SM90_TMA_LOAD_MULTICAST_2D::copy(
          &weight, full, kBoth, kNormal,
          shared_.weight[place_.at] + half_ * (kWeightBytes / kCluster), step * kStepOfK,
          column + half_ * (kTileColumns / kCluster));
      place_.advance();
    }
    /// 64 rows of a tile's columns, to be added to the sums.
    __device__ void load_rows(const CUtensorMap& from, int column, int row) {
      uint64_t* const full = begin(kBoxes * kBoxBytes);
      for (int box = 0; box < kBoxes; ++box) {
        cute::SM90_TMA_LOAD_2D::copy(&from, full, kNormal,
                                     shared_.weight[place_.at] + box * kBoxBytes,
                                     column + box * kBoxColumns, row);
      }
      place_.advance();
    }
    /// Helpers' partial sums of `work`, each of them once it is there.
    template <class Work>
    __device__ void load_partials(const Partials& partials, const Work& work, const Watch& watch,
                                  OpId op, int rank) {
#pragma unroll 1
      for (int part = 0; part < work.reads_partials * Partials::kSteps; ++part) {
        const int place = Partials::place(work.partial + part / Partials::kSteps);
        if (part % Partials::kSteps == 0) {
          // Both warpgroups' sums, for which nobody else waits.
          wait_for_load(partials.count + place, kGroups, watch, op, rank, place);
          partials.count[place] = 0;
        }
        load_rows(partials.map, 0, Partials::row(place, 0) + part % Partials::kSteps * kGroupRows);
      }
    }

   private:
    static constexpr auto kNormal = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);

    __device__ uint64_t* begin(uint32_t bytes) {
      shared_.empty[place_.at].wait(place_.phase ^ 1);
      shared_.full[place_.at].arrive_and_expect_tx(bytes);
      return reinterpret_cast<uint64_t*>(&shared_.full[place_.at]);
    }

    Shared& shared_;
    int half_;
    bool backwards_ = false;
    Place<kStages> place_;
  };

  // ---- The multiplying warpgroups --------------------------------------------------------------

  template <bool kFirst, class A, class B>
  __device__ static auto& first_if(A& a, B& b) {
    if constexpr (kFirst) {
      return a;
    } else {
      return b;
    }
  }

  template <class Work, class Params>
  __device__ static void multiply(const Params& params, Shared& shared, int group) {
    const int thread = int(threadIdx.x) % 128, warp = thread / 32, lane = thread % 32;
    const uint64_t x = operand_descriptor(address_of(shared.x[0]) + group * (kXBytes / kGroups));
    const uint64_t weight = operand_descriptor(address_of(shared.weight[0]));
    const Stamps stamps(params);
    Place<kStages> place;
    Place<kBuffers> buffer;
    float sums[kSums];
    [[maybe_unused]] float short_sums[Product::kOfCodes ? kSums : 1];
    auto& products = first_if<Product::kOfCodes>(short_sums, sums);
    // Its own block's barrier first, so that no block is told of a place that the other still waits
    // for.
    const auto release = [&](int stage) {
      if (thread != 0) return;
      const uint32_t own = cute::block_rank_in_cluster();
      shared.empty[stage].arrive();
      shared.empty[stage].arrive(own ^ 1);
    };
    uint32_t leaving[kSums / 2];  // of the tile before, rounded
    bool leaves = false;
    const auto write = [&](int box) {
      shared.taken[group][buffer.at].wait(buffer.phase ^ 1);
      const uint32_t to = address_of(shared.leaving[group][buffer.at]);
#pragma unroll
      for (int i = 0; i < kSixteens; ++i) {
        store_16(leaving + 4 * (box * kSixteens + i), lane_address(to, warp, lane, i));
      }
      cute::tma_store_fence();
      __syncwarp();
      if (lane == 0) shared.written[group][buffer.at].arrive();
      buffer.advance();
    };
    const auto write_all = [&] {
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) write(box);
    };
    const auto multiply_work = [&](const Work& work) {
      int reading = -1;  // the place that the last instructions read, if they have not ended
      int in_short = 0;  // steps whose products are in the short sums alone
      // A tile that is split is its first part's.
      const int recorder = group == 0 && !work.writes_partial ? thread : 1;
      const auto issue = [&](bool first) {
        shared.full[place.at].wait(place.phase);
        if (first) stamps.stamp(work.place(), recorder, &TileRecord::product_begin);
        fence_sums(products);
        cute::warpgroup_arrive();
        multiply_step<Operand>(products, x + place.at * (kXBytes >> 4),
                               weight + place.at * (kWeightBytes >> 4),
                               Product::kOfCodes ? in_short == 0 : first);
        cute::warpgroup_commit_batch();
      };
      const auto finish = [&] {
        cute::warpgroup_wait<0>();
        fence_sums(products);
        if (reading >= 0) release(reading);
        reading = -1;
      };
      const auto promote = [&] {
        if (in_short == 0) return;
        finish();
        in_short = 0;
#pragma unroll
        for (int i = 0; i < kSums; ++i) sums[i] += products[i];
      };
      const auto follow = [&] {
        cute::warpgroup_wait<1>();
        fence_sums(products);
        if (reading >= 0) release(reading);
        reading = place.at;
        place.advance();
        if constexpr (Product::kOfCodes) {
          if (++in_short == kShortSteps) promote();
        }
      };
      // 64 rows, which are one group's; the other only passes them on.
      const auto add_rows = [&](bool mine) {
        if (mine) {
          finish();
          shared.full[place.at].wait(place.phase);
          const uint32_t boxes = address_of(shared.weight[place.at]);
#pragma unroll
          for (int i = 0; i < kTileColumns / 16; ++i) {
            add_to_sums<Element>(
                sums, i,
                lane_address(boxes + i / kSixteens * kBoxBytes, warp, lane, i % kSixteens));
          }
        } else {
          shared.full[place.at].wait(place.phase);
        }
        // All have read, and none still waits for a place that is filled again when it looks.
        cutlass::arch::NamedBarrier::sync(128, group + 1);
        release(place.at);
        place.advance();
      };
      if constexpr (Product::kOfCodes) {
#pragma unroll
        for (float& sum : sums) sum = 0;
      }
      int step = 0;
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        const int at = work.leaves_at(group, box);
#pragma unroll 1
        for (; step < at; ++step) {
          issue(step == 0);
          follow();
        }
        issue(step == 0);
        if (leaves) write(box);
        follow();
        ++step;
      }
      const int parts = work.adding.parts + work.reads_partials * Partials::kSteps;
#pragma unroll 1
      for (int part = 0;; ++part) {
        const int until = part < work.adding.parts ? schedule::steps_before(work.adding, part)
                                                   : work.adding.steps;
#pragma unroll 1
        for (; step < until; ++step) {
          issue(false);
          follow();
        }
        if constexpr (Product::kOfCodes) {
          if (part == 0) {
            promote();
            scale_sums(sums, work.scales(params), group * kGroupRows + 16 * warp + lane / 4, lane);
          }
        }
        if (part == parts) break;
        add_rows(part % kStepsOfRows == group);
      }
      stamps.stamp(work.place(), recorder, &TileRecord::product_end);
      stamps.processor(work.place(), recorder);
      finish();
      round_sums<Element>(sums, leaving);
      leaves = !work.writes_partial;
      if (leaves) return;
      write_all();
      keep_rest<Element>(sums, leaving);
      write_all();
    };
    for_each_work<Work>(params, multiply_work);
    if (leaves) write_all();
  }

  // ---- A storing warp for each of them, one thread of it ---------------------------------------

  class Storer {
   public:
    __device__ Storer(Shared& shared, int group) : shared_(shared), group_(group) {}

    /// This warpgroup's half of a tile. `begin` is called when something of it is there.
    template <class Begin>
    __device__ void store(const CUtensorMap& to, int column, int row, Begin&& begin) {
#pragma unroll 1
      for (int box = 0; box < kBoxes; ++box) {
        shared_.written[group_][buffer_.at].wait(buffer_.phase);
        if (box == 0) begin();
        cute::SM90_TMA_STORE_2D::copy(&to, shared_.leaving[group_][buffer_.at],
                                      column + box * kBoxColumns, row + group_ * kGroupRows);
        cute::tma_store_arrive();
        if (kBuffers == 2 && box > 0) {
          cute::tma_store_wait<1>();
          shared_.taken[group_][buffer_.at ^ 1].arrive();
        }
        if (kBuffers == 1 || box + 1 == kBoxes) {
          cute::tma_store_wait<0>();
          shared_.taken[group_][buffer_.at].arrive();
        }
        buffer_.advance();
      }
    }
    __device__ void store(const CUtensorMap& to, int column, int row) {
      store(to, column, row, [] {});
    }
    template <class Work>
    __device__ void store_partial(const Partials& partials, const Work& work) {
      const int place = Partials::place(work.partial);
#pragma unroll 1
      for (int term = 0; term < Partials::kTerms; ++term)
        store(partials.map, 0, Partials::row(place, term));
      complete();
      asm volatile("red.release.gpu.global.add.u64 [%0], 1;" ::"l"(partials.count + place)
                   : "memory");
    }
    /// What was stored is in memory, for all who are told of it, behind a fence, after this.
    __device__ static void complete() {
      asm volatile("cp.async.bulk.wait_group 0;\n\tfence.proxy.async;" ::: "memory");
    }

   private:
    static_assert(kBuffers == 1 || kBuffers == 2);
    Shared& shared_;
    int group_;
    Place<kBuffers> buffer_;
  };

  // ---- All of a block --------------------------------------------------------------------------

  __device__ static uint32_t address_of(const void* shared) {
    return cute::cast_smem_ptr_to_uint(shared);
  }

  /// By one thread of the block.
  __device__ static void open(Shared& shared) {
    for (int i = 0; i < kStages; ++i) {
      shared.full[i].init(1);
      shared.empty[i].init(kCluster * kGroups);
    }
    for (int group = 0; group < kGroups; ++group) {
      for (int i = 0; i < kBuffers; ++i) {
        shared.written[group][i].init(4);  // warps
        shared.taken[group][i].init(1);
      }
    }
    cutlass::arch::fence_barrier_init();
  }

  /// `load` is called by one thread, `store` by one of each of two warps, `spare` by a warp.
  template <class Work, class Params, class Load, class Store, class Spare>
  __device__ static void run(const Params& params, Shared& shared, Load&& load, Store&& store,
                             Spare&& spare) {
    const int warp = __shfl_sync(0xffffffff, int(threadIdx.x) / 32, 0);
    if (threadIdx.x == 0) open(shared);
    cute::cluster_arrive();  // not relaxed: what an operator opened is seen, too
    cute::cluster_wait();
    if (warp < 4) {
      cutlass::arch::warpgroup_reg_dealloc<kLoadingRegisters>();
      if (warp == 0 && cute::elect_one_sync()) load();
      if (warp == 1) spare();
      if (warp >= 2 && cute::elect_one_sync()) store(warp - 2);
      __syncwarp();
    } else {
      cutlass::arch::warpgroup_reg_alloc<kMultiplyingRegisters>();
      multiply<Work>(params, shared, warp / 4 - 1);
    }
    // Until the other block has told it of all it read, and read all it loads for it.
    cute::cluster_arrive();
    cute::cluster_wait();
  }

  /// The first 1024-byte aligned address in the block's dynamic shared memory.
  template <class T>
  __device__ static T& aligned(std::byte* memory) {
    return *reinterpret_cast<T*>(memory + (1024 - address_of(memory) % 1024) % 1024);
  }
};

}  // namespace tandem::gpu::fused
