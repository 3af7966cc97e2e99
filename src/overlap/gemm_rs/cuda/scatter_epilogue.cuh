// Epilogue of the CUTLASS GEMM+RS. A remote tile is written from registers to the local send
// buffer, in register order, and one thread of a helper warp copies it from there into its owner's
// staging memory (sender.cuh): the main loop never waits for the link. For a local tile each thread
// waits for the peers' partials, adds all in rank order, in f32, and stores the sums.
//
// After a block's last tile there is no main loop to stall: a remote last tile is stored from
// registers directly into its owner's memory. kDirect: all remote tiles are, paced, which saves
// some 5 us of latency but must end before the warpgroup's next main loop: for few and short tiles.
// A tile then belongs to one warpgroup (pingpong), whose stores overlap the other's main loop;
// otherwise two warpgroups share it. The sending thread belongs to CUTLASS's epilogue-load warp,
// which has no loads to do.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/version.h>

#include <type_traits>

#include "comm/device/device_signal.cuh"
#include "gemm/cuda/tile_timeline.cuh"
#include "overlap/contract/cuda/wait_ids.h"
#include "overlap/gemm_rs/cuda/sender.cuh"
#include "overlap/gemm_rs/cuda/tile_fragments.cuh"

namespace tandem::gpu::fused {

template <class Base, class Element, int kColumns, bool kDirect>
class ScatterEpilogue : public Base {
 public:
  /// Threads that share a tile.
  static constexpr int kThreads = kDirect ? kWarpgroup : 2 * kWarpgroup;
  using Fragments = TileFragments<Element, kColumns, kThreads>;

  struct Arguments : Base::Arguments, OptionalLog {
    Scatter scatter;
  };
  struct Params : Base::Params, OptionalLog {
    Scatter scatter;
  };

  template <class Problem>
  static Params to_underlying_arguments(Problem const& problem, Arguments const& arguments,
                                        void* workspace) {
    return {Base::to_underlying_arguments(problem, arguments, workspace),
            static_cast<OptionalLog const&>(arguments), arguments.scatter};
  }

  struct WithSender : Base::TensorStorage {
    Sender sender;
  };
  using TensorStorage = std::conditional_t<kDirect, typename Base::TensorStorage, WithSender>;

  // CUTLASS's kernel constructs the epilogue in every thread before the block's first barrier, and
  // once more in the warps that use it: its loading warp and the consumers. Warp 0, which loads for
  // the main loop, does not. So thread 0 runs this exactly once, as opening the sender requires
  // (kOpeningThread).
  CUTLASS_DEVICE ScatterEpilogue(Params const& params, TensorStorage& storage)
      : Base(params, storage), scatter_(params.scatter), timestamps_(params), storage_(storage) {
    if constexpr (!kDirect) {
      if (threadIdx.x != kOpeningThread) return;
      storage.sender.open();
      __threadfence_block();
    }
  }

  // Called first by one thread of every block. The first block's signals the peers that this rank
  // is ready: what they send now overwrites nothing that is still read.
  CUTLASS_DEVICE static void prefetch_tma_descriptors(Params const& params) {
    Base::prefetch_tma_descriptors(params);
    if (blockIdx.x + blockIdx.y + blockIdx.z != 0) return;
    const PeerTable& peers = params.scatter.staging;
    const uint64_t epoch = params.scatter.this_epoch();
    for (int peer = 0; peer < peers.size; ++peer) {
      if (peer == peers.rank) continue;
      release_signal(params.scatter.signals_of(peer) + params.scatter.ready_flags + peers.rank,
                     epoch);
    }
  }

  CUTLASS_DEVICE bool is_producer_load_needed() const { return !kDirect; }

  // Called by the sending warp for each of the block's tiles, in their order.
  template <class Problem, class TileShape, class Coordinates, class Mma>
  CUTLASS_DEVICE auto load(typename Base::LoadPipeline, typename Base::LoadPipelineState loads,
                           Problem, TileShape, Coordinates at, Mma, int, TensorStorage&, int = -1) {
    if constexpr (!kDirect) {
      const int row = cute::get<0>(at), column = cute::get<1>(at);
      if (threadIdx.x == kSendingThread && scatter_.is_remote(row, column) &&
          !scatter_.is_last(row, column)) {
        storage_.sender.template send<Fragments::kTileBytes>(scatter_, timestamps_, row, column);
      }
      __syncwarp();
    }
    return loads;
  }
  CUTLASS_DEVICE auto load_tail(typename Base::LoadPipeline,
                                typename Base::LoadPipelineState loads) {
    if constexpr (!kDirect) {
      if (threadIdx.x == kSendingThread) storage_.sender.finish(scatter_, timestamps_);
      __syncwarp();
    }
    return loads;
  }

  template <class Problem, class TileShape, class Coordinates, class Accumulators, class Mma>
  CUTLASS_DEVICE auto store(typename Base::LoadPipeline, typename Base::LoadPipelineState loads,
                            typename Base::StorePipeline, typename Base::StorePipelineState stores,
                            Problem, TileShape, Coordinates at, Accumulators const& accumulators,
                            Mma, int thread, TensorStorage&, int = -1) {
    static_assert(int(cute::size(Mma{})) == kThreads);
    static_assert(cute::size<0>(TileShape{}) == Fragments::kRows);
    // Prevents values derived from the thread index from occupying registers through the main loop.
    asm volatile("" : "+r"(thread));
    const int row = cute::get<0>(at), column = cute::get<1>(at);
    const Scatter::TileLocation location = scatter_.locate(row, column);
    const bool is_local = scatter_.is_local(row, column),
               is_remote = scatter_.is_remote(row, column);
    const bool direct = is_remote && (kDirect || scatter_.is_last(row, column));
    timestamps_.stamp(at, thread == 0, &TileRecord::store_begin);
    if (direct) {
      send(accumulators, location, thread, at);
    } else if (is_remote) {
      write_vecs(accumulators, scatter_.send_buffer_at(location, Fragments::kTileBytes), thread);
      if constexpr (!kDirect) storage_.sender.handover.publish();
    } else if (is_local) {
      write_vecs(accumulators, partial_of(scatter_.staging.rank, location.tile), thread);
      add_partials(location.tile, thread, at);
    }
    timestamps_.stamp(at, thread == 0, &TileRecord::store_end);
    timestamps_.count(at, thread == 0, &TileRecord::stores);
    timestamps_.product(at, thread == 0);
    if (thread == 0 && (direct || !is_remote)) scatter_.count_tile();
    return cute::make_tuple(loads, stores);
  }

 private:
  // Both depend on CUTLASS's roles of the producer warps: in the first warpgroup, warp 0 loads for
  // the main loop and constructs the epilogue once, and warp 2 (threads 64 to 95) is the epilogue's
  // loading warp.
  static constexpr int kOpeningThread = 0;
  static constexpr int kSendingThread = 64;
  static_assert(CUTLASS_MAJOR == 4 && CUTLASS_MINOR == 2 && CUTLASS_PATCH == 0,
                "another CUTLASS: do threads 0 and 64 still have these roles?");
  static constexpr int kVecBytes = kThreads * 16;  // over all threads
  // `pace_ns` is for PacedBulkCopier::kChunk bytes; a kDirect tile pauses after each kVecBytes.
  static_assert(!kDirect || kVecBytes == PacedBulkCopier::kChunk);

  // Barriers for the threads that share a tile; CUTLASS reserves these ids for its users.
  CUTLASS_DEVICE static void sync() {
    cutlass::arch::NamedBarrier::sync(kThreads, kDirect ? cutlass::canonical_warp_group_idx() : 1);
  }
  /// Whether it holds for all threads that share a tile.
  CUTLASS_DEVICE static bool sync_and(bool local) {
    const unsigned barrier = kDirect ? cutlass::canonical_warp_group_idx() : 1;
    int all;
    asm volatile(
        "{\n\t.reg .pred mine, all;\n\t"
        "setp.ne.s32 mine, %1, 0;\n\t"
        "barrier.cta.red.and.pred all, %2, %3, mine;\n\t"
        "selp.s32 %0, 1, 0, all;\n\t}"
        : "=r"(all)
        : "r"(int(local)), "r"(barrier + cutlass::arch::NamedBarrier::ReservedNamedBarrierCount),
          "n"(kThreads)
        : "memory");
    return all != 0;
  }
  /// Address of `source`'s partial of a local tile.
  CUTLASS_DEVICE std::byte* partial_of(int source, int tile) const {
    return scatter_.staging_at(scatter_.staging.rank, source, tile, Fragments::kTileBytes);
  }

  template <class Accumulators>
  CUTLASS_DEVICE static void write_vecs(Accumulators const& accumulators, std::byte* tile,
                                        int thread) {
    uint4* to = reinterpret_cast<uint4*>(tile) + thread;
    CUTLASS_PRAGMA_UNROLL
    for (int vec = 0; vec < Fragments::kVecs; ++vec) {
      to[vec * kThreads] = Fragments::vec_of(accumulators, vec);
    }
  }

  /// Stores directly to the owner, once it is ready.
  template <class Accumulators, class Coordinates>
  CUTLASS_DEVICE void send(Accumulators const& accumulators, Scatter::TileLocation const& location,
                           int thread, Coordinates const& at) {
    const int rank = scatter_.staging.rank;
    if (!(ready_flag_ >> location.owner & 1)) {
      timestamps_.stamp(at, thread == 0, &TileRecord::stalled_begin);
      bool came = true;
      if (thread == 0) {
        came = wait_signal(scatter_.signals_of(rank) + scatter_.ready_flags + location.owner,
                           scatter_.this_epoch(), scatter_.deadline, kGemmRsWait, location.owner);
      }
      came = sync_and(came);
      timestamps_.stamp(at, thread == 0, &TileRecord::stalled_end);
      if (!came) return;  // it may still read the last call's data, and is not signalled
      if (kDirect) ready_flag_ |= 1u << location.owner;
    }
    timestamps_.stamp(at, thread == 0, &TileRecord::wait_begin);
    std::byte* tile =
        scatter_.staging_at(location.owner, rank, location.tile, Fragments::kTileBytes);
    uint4* to = reinterpret_cast<uint4*>(tile) + thread;
    uint64_t next = nanoseconds();
    CUTLASS_PRAGMA_UNROLL
    for (int vec = 0; vec < Fragments::kVecs; ++vec) {
      store_words(to + vec * kThreads, Fragments::vec_of(accumulators, vec));
      if (!kDirect) continue;
      next += uint64_t(scatter_.pace_ns);
      while (int64_t(nanoseconds() - next) < 0) __nanosleep(40);  // about the timer's resolution
    }
    sync();
    if (thread == 0) {
      release_signal(scatter_.arrival_at(location.owner, rank, location.tile),
                     scatter_.this_epoch());
    }
    timestamps_.stamp(at, thread == 0, &TileRecord::wait_end);
  }
  // Volatile: keeps program order with the pauses between stores.
  CUTLASS_DEVICE static void store_words(uint4* to, uint4 const& words) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words.x), "r"(words.y),
                 "r"(words.z), "r"(words.w)
                 : "memory");
  }

  /// Called by the threads that computed the tile: each reads the local partial that it wrote.
  template <class Coordinates>
  CUTLASS_DEVICE void add_partials(int tile, int thread, Coordinates const& at) const {
    const PeerTable& peers = scatter_.staging;
    timestamps_.stamp(at, thread == 0, &TileRecord::stalled_begin);
    if (thread < peers.size && thread != peers.rank) {
      wait_signal(scatter_.arrival_at(peers.rank, thread, tile), scatter_.this_epoch(),
                  extend_deadline(scatter_.deadline), kGemmRsWait, thread, tile);
    }
    sync();
    timestamps_.stamp(at, thread == 0, &TileRecord::stalled_end);
    // Many loads in flight cover memory latency; more would not fit the registers.
    if (peers.size <= 4) {
      add_arrived<4, 4>(tile, thread, at);
    } else {
      add_arrived<kMaxGpus, 2>(tile, thread, at);
    }
  }

  template <int kRanks, int kAtOnce, class Coordinates>
  CUTLASS_DEVICE void add_arrived(int tile, int thread, Coordinates const& at) const {
    static_assert(Fragments::kVecs % kAtOnce == 0);
    const auto corner = Fragments::corner(scatter_, cute::get<0>(at), cute::get<1>(at));
    const int ranks = scatter_.staging.size;
    const std::byte* slots = partial_of(0, tile) + thread * 16;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int first = 0; first < Fragments::kVecs; first += kAtOnce) {
      uint4 arrived_tiles[kRanks][kAtOnce] = {};
      const std::byte* slot = slots + first * kVecBytes;
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < kRanks; ++r) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kAtOnce; ++i) {
          if (r < ranks) {
            arrived_tiles[r][i] = load_fresh(reinterpret_cast<const uint4*>(slot + i * kVecBytes));
          }
        }
        slot += scatter_.slot_bytes;
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        // Ranks beyond the world add zeros.
        auto sum = Fragments::to_floats(arrived_tiles[0][i]);
        CUTLASS_PRAGMA_UNROLL
        for (int r = 1; r < kRanks; ++r) {
          const auto values = Fragments::to_floats(arrived_tiles[r][i]);
          CUTLASS_PRAGMA_UNROLL
          for (int e = 0; e < 8; ++e) sum[e] += values[e];
        }
        Fragments::store_sum(scatter_, corner, first + i, thread, sum);
      }
    }
  }

  Scatter const& scatter_;
  Timestamps timestamps_;
  TensorStorage& storage_;
  unsigned ready_flag_ = 0;  // owners seen ready for this call, a bit each (kDirect)
};

}  // namespace tandem::gpu::fused
