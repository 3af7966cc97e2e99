// The epilogue of the fused GEMM+RS. A tile goes from registers straight into its owner's staging
// memory, in the order in which the registers hold it: nobody but the same thread of the same
// kernel reads it there, so it needs no layout, no shared memory and no bounds. For a tile of the
// own rows each thread then waits for what the peers' threads sent, adds all in rank order, in f32,
// and stores the sums.
//
// A tile belongs to one warpgroup (pingpong), whose stores run under the other's product. They are
// paced: stores that pile up before the wire stop the processor's loads behind them.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/numeric_conversion.h>

#include <cute/tensor.hpp>

#include "comm/nccl/device_signal.cuh"
#include "overlap/cuda/tile_timeline.cuh"
#include "overlap/gemm_rs/cuda/fused.h"

namespace tandem::gpu::fused {

constexpr int kWarpgroup = 128;

struct Scatter {
  PeerTable staging;
  size_t slot_bytes;
  int entered, landed, tiles_of_slot;
  uint64_t* epoch;
  unsigned* done;
  int shard_tiles, column_tiles;
  void* out;  // [m / ranks, n]
  int n;
  int pace;            // cycles between two packs that a thread sends
  unsigned all_tiles;  // those outside the matrix too
  Watch watch;

  // Indexing the kernel's parameters by a variable would copy them to every thread's stack.
  template <class T>
  CUTLASS_DEVICE static T of_rank(T const (&values)[kMaxGpus], int rank) {
    T value = values[0];
    CUTLASS_PRAGMA_UNROLL
    for (int r = 1; r < kMaxGpus; ++r) value = r == rank ? values[r] : value;
    return value;
  }
  CUTLASS_DEVICE uint64_t* signals_of(int rank) const { return of_rank(staging.signals, rank); }
  CUTLASS_DEVICE uint64_t* landed_at(int owner, int source, int tile) const {
    return signals_of(owner) + landed + int64_t(source) * tiles_of_slot + tile;
  }
  CUTLASS_DEVICE uint64_t this_epoch() const { return *const_cast<volatile uint64_t*>(epoch) + 1; }
};

template <class Base, class Element>
class ScatterEpilogue : public Base {
  using Pack = cutlass::Array<Element, 8>;
  using Floats = cutlass::Array<float, 8>;
  struct Place {
    int row, column;
  };

 public:
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

  CUTLASS_DEVICE ScatterEpilogue(Params const& params, typename Base::TensorStorage& storage)
      : Base(params, storage), scatter_(params.scatter), stamps_(params) {}

  // One thread of every block comes here first. The first block's tells the peers that this rank
  // has entered the call: what they send now overwrites nothing that is still read.
  CUTLASS_DEVICE static void prefetch_tma_descriptors(Params const& params) {
    Base::prefetch_tma_descriptors(params);
    if (blockIdx.x + blockIdx.y + blockIdx.z != 0) return;
    const PeerTable& peers = params.scatter.staging;
    const uint64_t epoch = params.scatter.this_epoch();
    for (int peer = 0; peer < peers.size; ++peer) {
      if (peer == peers.rank) continue;
      release_signal(params.scatter.signals_of(peer) + params.scatter.entered + peers.rank, epoch);
    }
  }

  template <class Problem, class TileShape, class Coordinates, class Accumulators, class Mma>
  CUTLASS_DEVICE auto store(typename Base::LoadPipeline, typename Base::LoadPipelineState loads,
                            typename Base::StorePipeline, typename Base::StorePipelineState stores,
                            Problem, TileShape shape, Coordinates at,
                            Accumulators const& accumulators, Mma mma, int thread,
                            typename Base::TensorStorage&, int = -1) {
    static_assert(int(cute::size(Mma{})) == kWarpgroup);
    // What follows from the thread's number must not be kept in registers through the product.
    asm volatile("" : "+r"(thread));
    const int row = cute::get<0>(at), column = cute::get<1>(at);
    const int owner = row / scatter_.shard_tiles, row_of_shard = row - owner * scatter_.shard_tiles;
    const int tile = row_of_shard * scatter_.column_tiles + column;
    stamps_.stamp(at, thread, &TileRecord::store_begin);
    if (column < scatter_.column_tiles) {  // not so the second half of a cluster at the right edge
      send(accumulators, owner, tile, thread, at);
      if (owner == scatter_.staging.rank) {
        const auto places =
            mma.get_slice(thread).partition_C(cute::make_identity_tensor(cute::take<0, 2>(shape)));
        add_parts<int(cute::size(Accumulators{})) / 8>(tile, thread, at, [&](int i) {
          return Place{row_of_shard * int(cute::size<0>(shape)) + int(cute::get<0>(places(i))),
                       column * int(cute::size<1>(shape)) + int(cute::get<1>(places(i)))};
        });
      }
    }
    stamps_.stamp(at, thread, &TileRecord::store_end);
    stamps_.count(at, thread, &TileRecord::stores);
    stamps_.product(at, thread);
    if (thread == 0) count_tile();
    return cute::make_tuple(loads, stores);
  }

 private:
  // Barriers of one warpgroup; CUTLASS leaves these numbers to its users.
  CUTLASS_DEVICE static void sync_warpgroup() {
    cutlass::arch::NamedBarrier::sync(kWarpgroup, cutlass::canonical_warp_group_idx());
  }
  CUTLASS_DEVICE Pack* part_at(int owner, int source, int tile, int packs) const {
    std::byte* slot =
        Scatter::of_rank(scatter_.staging.memory, owner) + size_t(source) * scatter_.slot_bytes;
    return reinterpret_cast<Pack*>(slot) + int64_t(tile) * packs * kWarpgroup;
  }

  // In program order with the pauses between them.
  CUTLASS_DEVICE static void store_pack(Pack* to, Pack const& pack) {
    const auto& words = reinterpret_cast<const uint4&>(pack);
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words.x), "r"(words.y),
                 "r"(words.z), "r"(words.w)
                 : "memory");
  }

  template <class Accumulators, class Coordinates>
  CUTLASS_DEVICE void send(Accumulators const& accumulators, int owner, int tile, int thread,
                           Coordinates const& at) {
    constexpr int kPacks = int(cute::size(Accumulators{})) / 8;
    const PeerTable& peers = scatter_.staging;
    const bool to_peer = owner != peers.rank;
    if (to_peer && !(entered_ >> owner & 1)) {
      stamps_.stamp(at, thread, &TileRecord::held_begin);
      if (thread == 0) {
        wait_signal(scatter_.signals_of(peers.rank) + scatter_.entered + owner,
                    scatter_.this_epoch(), scatter_.watch, OpId::gemm_rs, owner);
      }
      sync_warpgroup();
      stamps_.stamp(at, thread, &TileRecord::held_end);
      entered_ |= 1u << owner;
    }
    Pack* to = part_at(owner, peers.rank, tile, kPacks) + thread;
    const int pace = to_peer ? scatter_.pace : 0;
    long long next = clock64();
    CUTLASS_PRAGMA_UNROLL
    for (int pack = 0; pack < kPacks; ++pack) {
      Floats values;
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < 8; ++e) values[e] = accumulators(pack * 8 + e);
      const Pack rounded = cutlass::NumericArrayConverter<Element, float, 8>{}(values);
      store_pack(to + pack * kWarpgroup, rounded);
      next += pace;
      while (clock64() < next) __nanosleep(40);
    }
    if (!to_peer) return;  // each thread reads what it wrote itself
    sync_warpgroup();
    if (thread == 0) {
      release_signal(scatter_.landed_at(owner, peers.rank, tile), scatter_.this_epoch());
    }
  }

  CUTLASS_DEVICE static Floats to_floats(uint4 words) {
    return cutlass::NumericArrayConverter<float, Element, 8>{}(
        reinterpret_cast<Pack const&>(words));
  }

  // `place_of` tells where an accumulator belongs in the output; even ones are followed by their
  // right neighbour.
  template <int kPacks, class Coordinates, class PlaceOf>
  CUTLASS_DEVICE void add_parts(int tile, int thread, Coordinates const& at,
                                PlaceOf const& place_of) const {
    const PeerTable& peers = scatter_.staging;
    stamps_.stamp(at, thread, &TileRecord::held_begin);
    if (thread < peers.size && thread != peers.rank) {
      wait_signal(scatter_.landed_at(peers.rank, thread, tile), scatter_.this_epoch(),
                  scatter_.watch, OpId::gemm_rs, thread, tile);
    }
    sync_warpgroup();
    stamps_.stamp(at, thread, &TileRecord::held_end);
    // Many loads at once cover the memory's latency; more would not fit the registers.
    if (peers.size <= 4) {
      add_landed<4, 4, kPacks>(tile, thread, place_of);
    } else {
      add_landed<kMaxGpus, 2, kPacks>(tile, thread, place_of);
    }
  }

  template <int kRanks, int kAtOnce, int kPacks, class PlaceOf>
  CUTLASS_DEVICE void add_landed(int tile, int thread, PlaceOf const& place_of) const {
    const int ranks = scatter_.staging.size;
    const auto* slots = reinterpret_cast<const std::byte*>(
        part_at(scatter_.staging.rank, 0, tile, kPacks) + thread);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int first = 0; first < kPacks; first += kAtOnce) {
      uint4 landed[kRanks][kAtOnce] = {};
      const std::byte* slot = slots;
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < kRanks; ++r) {
        const auto* from = reinterpret_cast<const uint4*>(slot) + first * kWarpgroup;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kAtOnce; ++i) {
          if (r < ranks && first + i < kPacks) landed[r][i] = load_fresh(from + i * kWarpgroup);
        }
        slot += scatter_.slot_bytes;
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i >= kPacks) continue;
        // Zeros of ranks that are not there change nothing.
        Floats sum = to_floats(landed[0][i]);
        CUTLASS_PRAGMA_UNROLL
        for (int r = 1; r < kRanks; ++r) {
          const Floats values = to_floats(landed[r][i]);
          CUTLASS_PRAGMA_UNROLL
          for (int e = 0; e < 8; ++e) sum[e] += values[e];
        }
        CUTLASS_PRAGMA_UNROLL
        for (int e = 0; e < 8; e += 2) {
          const Place place = place_of((first + i) * 8 + e);
          if (place.column >= scatter_.n) continue;
          auto* out = static_cast<Element*>(scatter_.out) + int64_t(place.row) * scatter_.n;
          *reinterpret_cast<cutlass::Array<Element, 2>*>(out + place.column) =
              cutlass::NumericArrayConverter<Element, float, 2>{}({sum[e], sum[e + 1]});
        }
      }
    }
  }

  // The last tile of the call advances the epoch: all others have read it.
  CUTLASS_DEVICE void count_tile() const {
    if (atomicAdd(scatter_.done, 1u) != scatter_.all_tiles - 1) return;
    *scatter_.done = 0;
    *scatter_.epoch += 1;
  }

  Scatter const& scatter_;
  Stamps stamps_;
  unsigned entered_ = 0;  // owners seen to have entered this call, by bit
};

}  // namespace tandem::gpu::fused
