// What a block of a hand-written persistent Hopper GEMM does, whatever its operands wait for and
// wherever its tiles go. It is three warpgroups: two multiply, each 64 rows of a tile of 128 x 256,
// or, of e4m3 values, 128 x 128; of the third, warp 0 loads, warps 2 and 3 store, and warp 1 is
// free. Two blocks, a cluster, have two tiles of the same columns and share the weight's rows: each
// loads half of them for both, by multicast.
//
// A step is a k-block of the main loop: 128 bytes along K of the tile's operands.
//
// The multiplying warpgroups never synchronise with each other: each waits for operands, releases
// them and writes its half of a tile by itself, so that one may multiply while the other is in its
// epilogue. The store of a rounded tile overlaps the next tile's main loop, 64 columns of a half at
// a time, through kBuffers buffers in shared memory of 8 KiB for each warpgroup; a storing warp
// takes it from there, and it alone waits for memory, unless that takes so long that no buffer is
// free.
//
// What a cluster does is read from a table that the host made: `params.works` has
// `params.works_of_cluster` of them for every cluster, the last of which ends at 0. A `Work` is
// made from the parameters and an entry of the table, also the last one, and has
//   tile_coord()                       row and column of its tile, for a timeline
//   begin, end, writes_partial, reads_partials, partial
//                                      which k-blocks (schedule/wave_split.h)
//   adding                             a schedule::AddingOrder: steps that add rows of another
//                                      matrix to the accumulators, loaded by the same pipeline; of
//                                      e4m3 after the main loop
//   store_step(group, box)             the k-block under which a box of the tile before is written
//                                      for its store: one after the other, all before `adding.lead`
//   scales(params)                     of e4m3: TileScales, or what has their members
//   finish(params, sums, lane)         if there is one: what else becomes of a tile's accumulators
// An operator brings the loading thread's and the storing threads' loops, made of the parts here.
// A `Form` says what else differs: whether blocks come in pairs, whether x's rows are gathered by
// the spare warp, whether a tile is gated, whether the weight is transposed, and in which wire
// format tiles travel, if in one: `Tile`, an encoded_tile.cuh's. Then `params.limit` is what it
// encodes within, and a `Work` also has
//   travels()                          its tile is stored encoded, and what it adds came so
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <type_traits>

#include "gemm/cuda/product_form.cuh"
#include "gemm/cuda/product_storer.cuh"
#include "gemm/cuda/tensor_map.h"
#include "gemm/cuda/tile_timeline.cuh"
#include "gemm/cuda/wait_for_load.cuh"
#include "gemm/cuda/warpgroup_product.cuh"
#include "schedule/adding_order.h"

namespace tandem::gpu::fused {

/// `Element`: of the result, and of all that is added to it. `kOwnBytes`: of the operator's shared
/// memory.
template <class Operand, class Element, int kBuffers, int kOwnBytes, class Form = PairedForm>
struct ProductBlock {
  using Product = WarpgroupProduct<Operand>;
  using Full = cutlass::arch::ClusterTransactionBarrier;
  using Empty = cutlass::arch::ClusterBarrier;

  static constexpr int kTileRows = 128, kTileColumns = Product::kColumns, kGroupRows = 64;
  static constexpr int kGroups = 2, kCluster = Form::kCluster;
  static constexpr int kStepOfK = fused::kStepOfK<Operand>;
  static constexpr int kThreads = 128 * (1 + kGroups);
  /// Registers of a thread after setmaxnreg; together no more than the 168 per thread that the
  /// block starts with: 65,536 by 384 threads, rounded down to a multiple of 8. The loading warps
  /// spilled with fewer than 72; 216 is what that leaves each multiplying thread, of which
  /// accumulators and staged tile take 192 (bf16).
  static constexpr int kLoadingRegisters = 72, kMultiplyingRegisters = 216;
  static_assert(kLoadingRegisters + kGroups * kMultiplyingRegisters <= 168 * (1 + kGroups));
  static constexpr int kBoxColumns = 128 / sizeof(Element);
  static constexpr int kStoredColumns = Form::kGated ? kTileColumns / 2 : kTileColumns;
  static constexpr int kBoxes = kStoredColumns / kBoxColumns;  // of 64 rows
  static constexpr int kColumnGroups16 = kBoxColumns / 16;
  /// K-blocks from one box's store of the tile before to the next one's, at least, and the least
  /// k-blocks that all of them can overlap. With a single buffer, the next box waits for a whole
  /// k-block longer until memory has taken the one before.
  static constexpr int kStagedBuffers = kBuffers;
  static constexpr int kEvery = kBuffers == 1 ? 2 : 1, kLead = kBoxes * kEvery;
  static constexpr int kStepsOfRows = kTileRows / kGroupRows;  // that add a tile's rows
  static constexpr bool kEncoded = requires { typename Form::Tile; };
  static constexpr uint32_t kXBytes = kTileRows * kStepBytes;
  static constexpr uint32_t kWeightBytes = kTileColumns * kStepBytes;
  static constexpr int kSums = kGroupRows * kTileColumns / 128;        // accumulators of a thread
  static constexpr int kStoredWords = kSums / (Form::kGated ? 4 : 2);  // of a thread, rounded
  static constexpr uint32_t kBoxBytes = kGroupRows * kBoxColumns * sizeof(Element);
  static_assert(kBoxes * kBoxBytes <= kWeightBytes);
  // A block has 227 KiB of shared memory; barriers and alignment take less than two.
  static constexpr int kStages =
      ((227 - 2) * 1024 - kOwnBytes - kGroups * kBuffers * kBoxBytes) / (kXBytes + kWeightBytes);

  struct Shared {
    alignas(1024) std::byte x[kStages][kXBytes];
    alignas(1024) std::byte weight[kStages][kWeightBytes];
    alignas(1024) std::byte staged[kGroups][kBuffers][kBoxBytes];
    Full full[kStages];
    Empty empty[kStages];
    Empty written[kGroups][kBuffers], taken[kGroups][kBuffers];
  };

  // Split-K partials, by slot (schedule::TileSteps::partial, and block of the cluster). Each f32
  // partial is stored as hi + lo in the result type.
  struct Partials {
    CUtensorMap map;
    uint64_t* count;  // by slot: warpgroups that have stored theirs; 0 between calls

    static constexpr int kTerms = 2, kSteps = kTerms * kStepsOfRows;
    static constexpr int row(int slot, int term) { return (slot * kTerms + term) * kTileRows; }
    __device__ static int slot(int partial) {
      return partial * kCluster + int(cute::block_rank_in_cluster());
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

    /// The k-block of a work that is loaded as number `number`. Works alternate the K direction
    /// (serpentine), for L2 reuse: what the one before read last is still there.
    template <class Work>
    __device__ int step_of(const Work& work, int number) const {
      return reversed_ ? work.end - 1 - number : work.begin + number;
    }
    /// After each work.
    __device__ void alternate_direction() { reversed_ = !reversed_; }
    /// Along K: this block's rows of x, and its half of the cluster's columns.
    __device__ void load_step(const CUtensorMap& x, const CUtensorMap& weight, int step, int row,
                              int column) {
      constexpr uint16_t kBoth = (1 << kCluster) - 1;
      uint64_t* const full = begin(kXBytes + kWeightBytes);
      cute::SM90_TMA_LOAD_2D::copy(&x, full, kNormal, shared_.x[state_.index], step * kStepOfK,
                                   row);
      cute::SM90_TMA_LOAD_MULTICAST_2D::copy(
          &weight, full, kBoth, kNormal,
          shared_.weight[state_.index] + half_ * (kWeightBytes / kCluster), step * kStepOfK,
          column + half_ * (kTileColumns / kCluster));
      state_.advance();
    }
    /// The two halves of the tile's columns begin at rows `low` and `high` of the weight; of a
    /// pair, each block loads one of them for both. `x` is not read where its rows are gathered.
    __device__ void load_step(const CUtensorMap& x, const CUtensorMap& weight, int step, int row,
                              int low, int high) {
      constexpr uint32_t kHalf = kWeightBytes / 2;
      uint64_t* const full = begin(kWeightBytes + (Form::kGathered ? 0 : kXBytes));
      std::byte* const columns = shared_.weight[state_.index];
      if constexpr (!Form::kGathered) {
        cute::SM90_TMA_LOAD_2D::copy(&x, full, kNormal, shared_.x[state_.index], step * kStepOfK,
                                     row);
      }
      if constexpr (kCluster == 2) {
        cute::SM90_TMA_LOAD_MULTICAST_2D::copy(&weight, full, uint16_t(3), kNormal,
                                               columns + half_ * kHalf, step * kStepOfK,
                                               half_ == 0 ? low : high);
      } else {
        cute::SM90_TMA_LOAD_2D::copy(&weight, full, kNormal, columns, step * kStepOfK, low);
        cute::SM90_TMA_LOAD_2D::copy(&weight, full, kNormal, columns + kHalf, step * kStepOfK,
                                     high);
      }
      state_.advance();
    }
    /// 64 rows of a tile's columns, to be added to the accumulators.
    __device__ void load_rows(const CUtensorMap& from, int column, int row) {
      uint64_t* const full = begin(kBoxes * kBoxBytes);
      for (int box = 0; box < kBoxes; ++box) {
        cute::SM90_TMA_LOAD_2D::copy(&from, full, kNormal,
                                     shared_.weight[state_.index] + box * kBoxBytes,
                                     column + box * kBoxColumns, row);
      }
      state_.advance();
    }
    /// The same, of a slice in a wire format.
    __device__ void load_slice(const std::byte* from, uint32_t bytes) {
      uint64_t* const full = begin(bytes);
      cute::SM90_BULK_COPY_G2S::copy(from, full, shared_.weight[state_.index], int32_t(bytes));
      state_.advance();
    }
    /// Helpers' split-K partials of `work`, each of them once it is there.
    template <class Work>
    __device__ void load_partials(const Partials& partials, const Work& work, const Watch& watch,
                                  OpId op, int rank) {
#pragma unroll 1
      for (int step = 0; step < work.reads_partials * Partials::kSteps; ++step) {
        const int partial_slot = Partials::slot(work.partial + step / Partials::kSteps);
        if (step % Partials::kSteps == 0) {
          // Both warpgroups' accumulators, for which nobody else waits.
          wait_for_load(partials.count + partial_slot, kGroups, watch, op, rank, partial_slot);
          partials.count[partial_slot] = 0;
        }
        load_rows(partials.map, 0,
                  Partials::row(partial_slot, 0) + step % Partials::kSteps * kGroupRows);
      }
    }

   protected:
    static constexpr auto kNormal = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);

    __device__ uint64_t* begin(uint32_t bytes) {
      shared_.empty[state_.index].wait(state_.phase ^ 1);
      shared_.full[state_.index].arrive_and_expect_tx(bytes);
      return reinterpret_cast<uint64_t*>(&shared_.full[state_.index]);
    }

    Shared& shared_;
    int half_;
    bool reversed_ = false;
    PipelineState<kStages> state_;
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

  /// By thread 0, behind its own wgmma.wait_group; that the other three warps have passed
  /// full.wait, too, is assumed, not known: wgmma keeps the four warps of a warpgroup together, so
  /// none can be a whole stage behind. CUTLASS's release of multicast stages assumes the same.
  /// Arrives locally first: the remote arrive may let the peer refill.
  __device__ static void release_stage(Shared& shared, int thread, int index) {
    if (thread != 0) return;
    [[maybe_unused]] const uint32_t own = cute::block_rank_in_cluster();
    shared.empty[index].arrive();
    if constexpr (kCluster == 2) shared.empty[index].arrive(own ^ 1);
  }
  /// A warp's rows of a box of the rounded tile, to a buffer that a storing warp takes it from.
  __device__ static void copy_box(const uint32_t (&rounded)[kStoredWords], int box, uint32_t to,
                                  int warp, int lane) {
#pragma unroll
    for (int i = 0; i < kColumnGroups16; ++i) {
      store_16(rounded + 4 * (box * kColumnGroups16 + i), lane_address(to, warp, lane, i));
    }
    cute::tma_store_fence();
    __syncwarp();
  }
  /// Adds a warp's rows of all boxes of a tile, which begin at `boxes`.
  __device__ static void add_boxes(float (&sums)[kSums], uint32_t boxes, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < kTileColumns / 16; ++i) {
      add_to_sums<Element>(
          sums, i,
          lane_address(boxes + i / kColumnGroups16 * kBoxBytes, warp, lane, i % kColumnGroups16));
    }
  }

  template <class Work, class Params>
  __device__ static void multiply(const Params& params, Shared& shared, int group) {
    const int thread = int(threadIdx.x) % 128, warp = thread / 32, lane = thread % 32;
    const uint64_t x = operand_descriptor(address_of(shared.x[0]) + group * (kXBytes / kGroups));
    const uint64_t weight = operand_descriptor<Form::kTransposed>(address_of(shared.weight[0]));
    const Stamps stamps(params);
    PipelineState<kStages> stage;
    PipelineState<kBuffers> buffer;
    float sums[kSums];
    [[maybe_unused]] float short_sums[Product::kFp8 ? kSums : 1];
    auto& products = first_if<Product::kFp8>(short_sums, sums);
    const auto release = [&](int index) { release_stage(shared, thread, index); };
    uint32_t
        staged_tile[kStoredWords];  // the tile before, rounded, until it is written for its store
    bool has_staged_tile = false;
    [[maybe_unused]] bool staged_is_encoded = false;
    const auto write_box = [&](int box) {
      shared.taken[group][buffer.index].wait(buffer.phase ^ 1);
      std::byte* const to = shared.staged[group][buffer.index];
      if (kEncoded && staged_is_encoded) {
        if constexpr (kEncoded) Form::Tile::write(staged_tile, box, to, thread);
        cute::tma_store_fence();
        __syncwarp();
      } else {
        copy_box(staged_tile, box, address_of(to), warp, lane);
      }
      if (lane == 0) shared.written[group][buffer.index].arrive();
      buffer.advance();
    };
    const auto write_tile = [&] {
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) write_box(box);
    };
    // Rounds the accumulators; the next main loop writes the tile. A split-K partial, hi and lo, is
    // written at once.
    const auto epilogue = [&](const Work& work) {
      if constexpr (Form::kGated) {
        has_staged_tile = true;
        return round_gated<Element>(sums, staged_tile);
      } else {
        if constexpr (kEncoded) {
          staged_is_encoded = work.travels();
          if (staged_is_encoded) {
            has_staged_tile = true;
            return Form::Tile::encode(sums, params.limit, lane, staged_tile);
          }
        }
        round_sums<Element>(sums, staged_tile);
      }
      has_staged_tile = !work.writes_partial;
      if (has_staged_tile) return;
      if constexpr (!Form::kGated) {
        write_tile();
        round_remainder<Element>(sums, staged_tile);
        write_tile();
      }
    };
    const auto multiply_work = [&](const Work& work) {
      int unreleased_stage = -1;  // that wgmmas read which may not have ended
      int unpromoted = 0;         // k-blocks that are in the short accumulators alone
      // A tile that is split along K is recorded by who has its first k-blocks.
      const bool records = thread == 0 && group == 0 && !work.writes_partial;
      const auto issue = [&](bool first) {
        shared.full[stage.index].wait(stage.phase);
        // Copies by cp.async, of which each has arrived by itself, are read by the tensor cores.
        if constexpr (Form::kGathered) {
          asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        }
        if (first) stamps.stamp(work.tile_coord(), records, &TileRecord::product_begin);
        fence_sums(products);
        cute::warpgroup_arrive();
        multiply_step<Operand, false, Form::kTransposed>(products, x + stage.index * (kXBytes >> 4),
                                                         weight + stage.index * (kWeightBytes >> 4),
                                                         Product::kFp8 ? unpromoted == 0 : first);
        cute::warpgroup_commit_batch();
      };
      const auto retire_all = [&] {
        cute::warpgroup_wait<0>();
        fence_sums(products);
        if (unreleased_stage >= 0) release(unreleased_stage);
        unreleased_stage = -1;
      };
      const auto promote = [&] {
        if (unpromoted == 0) return;
        retire_all();
        unpromoted = 0;
#pragma unroll
        for (int i = 0; i < kSums; ++i) sums[i] += products[i];
      };
      const auto retire_previous = [&] {
        cute::warpgroup_wait<1>();
        fence_sums(products);
        if (unreleased_stage >= 0) release(unreleased_stage);
        unreleased_stage = stage.index;
        stage.advance();
        if constexpr (Product::kFp8) {
          if (++unpromoted == kPromotionSteps) promote();
        }
      };
      // 64 rows, which are one warpgroup's; the other only releases their stage.
      const auto add_rows = [&](bool mine, [[maybe_unused]] bool received) {
        if (mine) {
          retire_all();
          shared.full[stage.index].wait(stage.phase);
          if (kEncoded && received) {
            if constexpr (kEncoded) Form::Tile::add(sums, shared.weight[stage.index], thread);
          } else {
            add_boxes(sums, address_of(shared.weight[stage.index]), warp, lane);
          }
        } else {
          shared.full[stage.index].wait(stage.phase);
        }
        // All have read, and none still waits for the phase of a stage that is refilled meanwhile.
        cutlass::arch::NamedBarrier::sync(128, group + 1);
        release(stage.index);
        stage.advance();
      };
      if constexpr (Product::kFp8) {
#pragma unroll
        for (float& sum : sums) sum = 0;
      }
      // The first k-blocks, under which the tile before is written for its store.
      int step = 0;
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        const int at = work.store_step(group, box);
#pragma unroll 1
        for (; step < at; ++step) {
          issue(step == 0);
          retire_previous();
        }
        issue(step == 0);
        if (has_staged_tile) write_box(box);
        retire_previous();
        ++step;
      }
      // The others, between which received rows and split-K partials are added.
      const int add_steps = work.adding.add_steps + work.reads_partials * Partials::kSteps;
#pragma unroll 1
      for (int add_step = 0;; ++add_step) {
        const int until = add_step < work.adding.add_steps
                              ? schedule::steps_before(work.adding, add_step)
                              : work.adding.steps;
#pragma unroll 1
        for (; step < until; ++step) {
          issue(false);
          retire_previous();
        }
        if constexpr (Product::kFp8) {
          if (add_step == 0) {
            promote();
            scale_sums(sums, work.scales(params), group * kGroupRows + 16 * warp + lane / 4, lane);
          }
        }
        if (add_step == add_steps) break;
        add_rows(add_step % kStepsOfRows == group, add_step < work.adding.add_steps);
      }
      stamps.stamp(work.tile_coord(), records, &TileRecord::product_end);
      stamps.processor(work.tile_coord(), records);
      retire_all();
      if constexpr (requires { work.finish(params, sums, lane); }) work.finish(params, sums, lane);
      epilogue(work);
    };
    for_each_work<Work>(params, multiply_work);
    if (has_staged_tile) write_tile();
  }

  // ---- A storing warp for each of them, one thread of it ---------------------------------------

  using Storer = ProductStorer<ProductBlock>;

  // ---- All of a block --------------------------------------------------------------------------

  __device__ static uint32_t address_of(const void* shared) {
    return cute::cast_smem_ptr_to_uint(shared);
  }

  /// By one thread of the block.
  __device__ static void open(Shared& shared) {
    for (int i = 0; i < kStages; ++i) {
      shared.full[i].init(Form::kGathered ? 1 + 32 : 1);  // each lane of the gathering warp
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
    synchronize();  // what an operator opened is seen, too
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
    // Not before the other block has released all stages here, and read all that is loaded for it.
    synchronize();
  }
  __device__ static void synchronize() {
    if constexpr (kCluster == 1) return __syncthreads();
    cute::cluster_arrive();  // not relaxed
    cute::cluster_wait();
  }

  /// The first 1024-byte aligned address in the block's dynamic shared memory.
  template <class T>
  __device__ static T& aligned(std::byte* memory) {
    return *reinterpret_cast<T*>(memory + (1024 - address_of(memory) % 1024) % 1024);
  }
};

}  // namespace tandem::gpu::fused
