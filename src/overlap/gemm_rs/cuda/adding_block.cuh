// What a block of adding.h's kernel does. It is three warpgroups: two multiply, each 64 rows of a
// tile of 128 x 256; of the third, one warp loads and two store. Two blocks have two tiles of the
// same columns and share the weight's rows: each loads half of them for both.
//
// The multiplying warpgroups meet nowhere: each waits for operands, releases them and writes its
// half of a tile by itself, so that one may multiply while the other's tile leaves. What they write
// goes through 16 KiB of shared memory, a quarter of the half at a time, and their storing warp
// takes it from there: it alone waits for memory.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "overlap/cuda/tensor_map.h"
#include "overlap/cuda/wait_for_load.cuh"
#include "overlap/cuda/warpgroup_product.cuh"
#include "overlap/gemm_rs/cuda/adding.h"
#include "schedule/adding_order.h"
#include "schedule/rs_piece_order.h"

namespace tandem::gpu::fused {

template <class Element>
struct AddingBlock {
  using Full = cutlass::arch::ClusterTransactionBarrier;
  using Empty = cutlass::arch::ClusterBarrier;

  static constexpr int kTileRows = 128, kTileColumns = kProductColumns, kGroupRows = 64;
  static constexpr int kGroups = 2, kCluster = 2, kStages = 4;
  static constexpr int kThreads = 128 * (1 + kGroups);
  static constexpr int kBoxColumns = 128 / sizeof(Element);
  static constexpr int kBoxes = kTileColumns / kBoxColumns;  // of 64 rows, or quarters of a half
  static constexpr int kBuffers = 2;                         // a quarter each
  static constexpr int kSixteens = kBoxColumns / 16;
  static constexpr int kStepsOfPart = kTileRows / kGroupRows;
  static constexpr uint32_t kXBytes = kTileRows * kStepOfK * sizeof(Element);
  static constexpr uint32_t kWeightBytes = kTileColumns * kStepOfK * sizeof(Element);
  static constexpr uint32_t kBoxBytes = kGroupRows * kBoxColumns * sizeof(Element);
  static_assert(kBoxes * kBoxBytes <= kWeightBytes);
  static_assert(kMaxGpus * AddingKernel::kMostPieces <= 32);

  struct Params {
    CUtensorMap x, weight, out, outbox, parts, lent;
    schedule::RsPieceOrder order;      // in pairs of rows of tiles
    const schedule::PieceWork* works;  // of every cluster, one after the other; the last ends at 0
    int works_of_cluster;
    int shard_rows;
    unsigned tiles_of_piece;  // by warpgroups
    uint64_t* lent_count;     // by block, 0 between calls
    AddingJob job;
  };

  struct Shared {
    alignas(1024) std::byte x[kStages][kXBytes];
    alignas(1024) std::byte weight[kStages][kWeightBytes];
    alignas(1024) std::byte leaving[kGroups][kBuffers][kBoxBytes];
    Full full[kStages];
    Empty empty[kStages];
    Empty written[kGroups][kBuffers], taken[kGroups][kBuffers];
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

  struct Work : schedule::PieceWork {
    bool own;
    int row;               // its first one, of the shard
    int column, in_piece;  // its first one, of all and of the piece
    schedule::AddingOrder adding;
    __device__ Work(const Params& params, const schedule::PieceWork& work)
        : schedule::PieceWork(work) {
      own = tile.step + 1 == params.order.ranks;
      row = (tile.row * kCluster + int(cute::block_rank_in_cluster())) * kTileRows;
      in_piece = tile.column * kTileColumns;
      column = tile.piece * params.order.piece_columns() * kTileColumns + in_piece;
      adding = {end - begin, own && !lends ? params.order.added : 0, kBoxes};
    }
    /// Where its first row is among shards of pieces, one below the other.
    __device__ int row_of(const Params& params, int shard) const {
      return (shard * params.order.pieces + tile.piece) * params.shard_rows + row;
    }
  };

  template <class Body>
  __device__ static void for_each_work(const Params& params, Body&& body) {
    const schedule::PieceWork* at = params.works + blockIdx.x / kCluster * params.works_of_cluster;
    for (; at->end != 0; ++at) {
      asm volatile("prefetch.global.L1 [%0];" ::"l"(at + 1));
      body(Work(params, *at));
    }
  }

  // What is lent, in two terms, since one has fewer bits than the sums: by place and block of the
  // cluster.
  static constexpr int kTerms = 2, kLentSteps = kTerms * kStepsOfPart;
  static constexpr int lent_row(int place, int term) { return (place * kTerms + term) * kTileRows; }
  __device__ static int lent_place(int lent) {
    return lent * kCluster + int(cute::block_rank_in_cluster());
  }

  // ---- The loading warp, one thread of it ------------------------------------------------------

  __device__ static void load(const Params& params, Shared& shared) {
    const int half = int(cute::block_rank_in_cluster());
    constexpr uint16_t kBoth = (1 << kCluster) - 1;
    constexpr uint64_t kNoHint = 0x1000000000000000;
    Place<kStages> place;
    unsigned here = 0;  // pieces seen to have arrived, by bit of their signal
    const auto begin_step = [&](uint32_t bytes) -> uint64_t* {
      shared.empty[place.at].wait(place.phase ^ 1);
      shared.full[place.at].arrive_and_expect_tx(bytes);
      return reinterpret_cast<uint64_t*>(&shared.full[place.at]);
    };
    const auto load_rows = [&](const CUtensorMap& from, int column, int row) {
      uint64_t* const full = begin_step(kBoxes * kBoxBytes);
      for (int box = 0; box < kBoxes; ++box) {
        cute::SM90_TMA_LOAD_2D::copy(&from, full, kNoHint,
                                     shared.weight[place.at] + box * kBoxBytes,
                                     column + box * kBoxColumns, row);
      }
      place.advance();
    };
    for_each_work(params, [&](const Work& work) {
      const int first_row = work.tile.owner * params.shard_rows + work.row;
      int step = 0;
      const auto load_until = [&](int until) {
#pragma unroll 1
        for (; step < until; ++step) {
          const int at = (work.begin + step) * kStepOfK;
          uint64_t* const full = begin_step(kXBytes + kWeightBytes);
          cute::SM90_TMA_LOAD_2D::copy(&params.x, full, kNoHint, shared.x[place.at], at, first_row);
          cute::SM90_TMA_LOAD_MULTICAST_2D::copy(
              &params.weight, full, kBoth, kNoHint,
              shared.weight[place.at] + half * (kWeightBytes / kCluster), at,
              work.column + half * (kTileColumns / kCluster));
          place.advance();
        }
      };
#pragma unroll 1
      for (int part = 0; part < work.adding.parts; ++part) {
        load_until(schedule::steps_before(work.adding, part));
        const int source = part / kStepsOfPart;
        await(params, source, work.tile.piece, here);
        load_rows(params.parts, work.in_piece,
                  work.row_of(params, source) + part % kStepsOfPart * kGroupRows);
      }
      load_until(work.adding.steps);
#pragma unroll 1
      for (int part = 0; part < work.borrows * kLentSteps; ++part) {
        const int lent = lent_place(work.lent + part / kLentSteps);
        if (part % kLentSteps == 0) borrow(params, lent);
        load_rows(params.lent, 0, lent_row(lent, 0) + part % kLentSteps * kGroupRows);
      }
    });
  }

  // Until both warpgroups' sums are there; nobody else waits for them.
  __device__ static void borrow(const Params& params, int lent) {
    const AddingJob& job = params.job;
    wait_for_load(params.lent_count + lent, kGroups, patient(job.watch), OpId::gemm_rs,
                  job.staging.rank, lent);
    params.lent_count[lent] = 0;
  }

  __device__ static void await(const Params& params, int source, int piece, unsigned& here) {
    const AddingJob& job = params.job;
    const int signal = source * AddingKernel::kMostPieces + piece;
    if (here & 1u << signal) return;
    wait_for_load(job.staging.signals[job.staging.rank] + job.arrived + signal,
                  *static_cast<const volatile uint64_t*>(job.epoch) + 1, patient(job.watch),
                  OpId::gemm_rs, schedule::rs_source(job.staging.rank, job.staging.size, source),
                  piece);
    here |= 1u << signal;
  }

  // ---- The multiplying warpgroups --------------------------------------------------------------

  __device__ static void multiply(const Params& params, Shared& shared, int group) {
    const int thread = int(threadIdx.x) % 128, warp = thread / 32, lane = thread % 32;
    const uint64_t x = operand_descriptor(address_of(shared.x[0]) + group * (kXBytes / kGroups));
    const uint64_t weight = operand_descriptor(address_of(shared.weight[0]));
    Place<kStages> place;
    Place<kBuffers> buffer;
    float sums[kSums];
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
      const auto issue = [&](bool first) {
        shared.full[place.at].wait(place.phase);
        fence_sums(sums);
        cute::warpgroup_arrive();
        multiply_step<Element>(sums, x + place.at * (kXBytes >> 4),
                               weight + place.at * (kWeightBytes >> 4), first);
        cute::warpgroup_commit_batch();
      };
      const auto follow = [&] {
        cute::warpgroup_wait<1>();
        fence_sums(sums);
        if (reading >= 0) release(reading);
        reading = place.at;
        place.advance();
      };
      const auto finish = [&] {
        cute::warpgroup_wait<0>();
        fence_sums(sums);
        if (reading >= 0) release(reading);
        reading = -1;
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
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        issue(box == 0);
        if (leaves) write(box);
        follow();
      }
      const int parts = work.adding.parts + work.borrows * kLentSteps;
      int step = kBoxes;
#pragma unroll 1
      for (int part = 0;; ++part) {
        const int until = part < work.adding.parts ? schedule::steps_before(work.adding, part)
                                                   : work.adding.steps;
#pragma unroll 1
        for (; step < until; ++step) {
          issue(false);
          follow();
        }
        if (part == parts) break;
        add_rows(part % kStepsOfPart == group);
      }
      finish();
      round_sums<Element>(sums, leaving);
      leaves = !work.lends;
      if (leaves) return;
      write_all();
      keep_rest<Element>(sums, leaving);
      write_all();
    };
    for_each_work(params, multiply_work);
    if (leaves) write_all();
  }

  // ---- A storing warp for each of them, one thread of it ---------------------------------------

  __device__ static void store(const Params& params, Shared& shared, int group) {
    Place<kBuffers> buffer;
    const auto store_half = [&](const CUtensorMap& to, int column, int row) {
#pragma unroll 1
      for (int box = 0; box < kBoxes; ++box) {
        shared.written[group][buffer.at].wait(buffer.phase);
        cute::SM90_TMA_STORE_2D::copy(&to, shared.leaving[group][buffer.at],
                                      column + box * kBoxColumns, row + group * kGroupRows);
        cute::tma_store_arrive();
        if (box > 0) {
          cute::tma_store_wait<1>();
          shared.taken[group][buffer.at ^ 1].arrive();
        }
        if (box + 1 == kBoxes) {
          cute::tma_store_wait<0>();
          shared.taken[group][buffer.at].arrive();
        }
        buffer.advance();
      }
    };
    for_each_work(params, [&](const Work& work) {
      if (work.lends) {
        const int place = lent_place(work.lent);
#pragma unroll 1
        for (int term = 0; term < kTerms; ++term) {
          store_half(params.lent, 0, lent_row(place, term));
        }
        complete_stores();
        asm volatile("red.release.gpu.global.add.u64 [%0], 1;" ::"l"(params.lent_count + place)
                     : "memory");
      } else if (work.own) {
        store_half(params.out, work.column, work.row);
      } else {
        store_half(params.outbox, work.in_piece, work.row_of(params, work.tile.owner));
        complete_stores();
        count(params, work.tile);
      }
    });
  }

  // In memory, for all who are told of it after this.
  __device__ static void complete_stores() {
    asm volatile("cp.async.bulk.wait_group 0;\n\tfence.proxy.async;" ::: "memory");
    __threadfence();
  }

  // Who counts a piece's last tile tells the stream that sends it, when its owner has entered.
  __device__ static void count(const Params& params, const schedule::PieceTile& place) {
    const AddingJob& job = params.job;
    const int number = place.step * AddingKernel::kMostPieces + place.piece;
    if (atomicAdd(job.counted + number, 1) + 1 != params.tiles_of_piece) return;
    const uint64_t epoch = *static_cast<const volatile uint64_t*>(job.epoch) + 1;
    job.counted[number] = 0;
    wait_signal(job.staging.signals[job.staging.rank] + job.entered + place.owner, epoch, job.watch,
                OpId::gemm_rs, place.owner);
    *static_cast<volatile uint64_t*>(job.sending) = epoch;
    __threadfence_system();
    *static_cast<volatile unsigned*>(job.ready + number) = 1;
  }

  // ---- All of a block --------------------------------------------------------------------------

  __device__ static uint32_t address_of(const void* shared) {
    return cute::cast_smem_ptr_to_uint(shared);
  }

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

  // Peers may overwrite what they sent for the last call.
  __device__ static void enter(const AddingJob& job, int peer) {
    if (peer >= job.staging.size || peer == job.staging.rank) return;
    const uint64_t epoch = *static_cast<const volatile uint64_t*>(job.epoch) + 1;
    release_signal(job.staging.signals[peer] + job.entered + job.staging.rank, epoch);
  }

  // The block that ends last leaves all as the next call wants it.
  __device__ static void leave(const AddingJob& job) {
    __threadfence();
    if (atomicAdd(job.done, 1) + 1 != gridDim.x) return;
    *job.done = 0;
    *job.epoch += 1;
  }

  __device__ static void run(const Params& params, std::byte* memory) {
    Shared& shared =
        *reinterpret_cast<Shared*>(memory + ((1024 - address_of(memory) % 1024) % 1024));
    const int warp = __shfl_sync(0xffffffff, int(threadIdx.x) / 32, 0), lane = threadIdx.x % 32;
    if (threadIdx.x == 0) open(shared);
    if (warp == 2 && cute::elect_one_sync()) {
      for (const CUtensorMap* map :
           {&params.x, &params.weight, &params.out, &params.outbox, &params.parts, &params.lent}) {
        asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
      }
    }
    cute::cluster_arrive_relaxed();
    if (blockIdx.x == 0 && warp == 1) enter(params.job, lane);
    cute::cluster_wait();
    if (warp < 4) {
      cutlass::arch::warpgroup_reg_dealloc<40>();
      if (warp == 0 && cute::elect_one_sync()) load(params, shared);
      if (warp >= 2 && cute::elect_one_sync()) store(params, shared, warp - 2);
      __syncwarp();
    } else {
      cutlass::arch::warpgroup_reg_alloc<232>();
      multiply(params, shared, warp / 4 - 1);
    }
    // Until the other block has told it of all it read, and read all it loads for it.
    cute::cluster_arrive();
    cute::cluster_wait();
    if (threadIdx.x == 0) leave(params.job);
  }

  static constexpr int kSharedBytes = int(sizeof(Shared)) + 1024;
};

}  // namespace tandem::gpu::fused
