// The epilogue of the fused GEMM+RS. A tile of another rank's rows goes from registers into this
// rank's outbox, in the order in which the registers hold it, and a warp that has nothing to do
// with the product carries it from there into its owner's staging memory (sender.cuh): the product
// never waits for the wire. Nobody but the same thread of the same kernel reads a tile there, so it
// needs no layout, no shared memory and no bounds. For a tile of the own rows each thread then
// waits for what the peers sent, adds all in rank order, in f32, and stores the sums.
//
// kDirect: the tile goes from registers straight into its owner's memory, paced, which takes some
// 5 us less on its way but must end before the warpgroup's next product: for few and short tiles.
//
// A tile belongs to one warpgroup (pingpong), whose stores run under the other's product. The warp
// that sends is CUTLASS's for the epilogue's loads, of which there are none.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/numeric_conversion.h>

#include <cute/tensor.hpp>

#include "comm/nccl/device_signal.cuh"
#include "overlap/cuda/tile_timeline.cuh"
#include "overlap/gemm_rs/cuda/scatter.cuh"
#include "overlap/gemm_rs/cuda/sender.cuh"

namespace tandem::gpu::fused {

constexpr int kWarpgroup = 128;

template <class Base, class Element, bool kDirect>
class ScatterEpilogue : public Base {
  using Pack = cutlass::Array<Element, 8>;
  using Floats = cutlass::Array<float, 8>;
  struct Position {
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

  struct TensorStorage : Base::TensorStorage {
    Sender sender;
  };

  CUTLASS_DEVICE ScatterEpilogue(Params const& params, TensorStorage& storage)
      : Base(params, storage), scatter_(params.scatter), stamps_(params), sender_(storage.sender) {
    if (!kDirect && threadIdx.x == kSendingThread) sender_.open();
  }

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

  CUTLASS_DEVICE bool is_producer_load_needed() const { return !kDirect; }

  // The sending warp comes here for each of the block's tiles, in their order.
  template <class Problem, class TileShape, class Coordinates, class Mma>
  CUTLASS_DEVICE auto load(typename Base::LoadPipeline, typename Base::LoadPipelineState loads,
                           Problem, TileShape, Coordinates at, Mma, int, TensorStorage&, int = -1) {
    constexpr int kElements = int(cute::size<0>(TileShape{}) * cute::size<1>(TileShape{}));
    const int row = cute::get<0>(at), column = cute::get<1>(at);
    if (threadIdx.x == kSendingThread && is_others(column, scatter_.place_of(row, column))) {
      sender_.template send<kElements* int(sizeof(Element))>(scatter_, stamps_, row, column);
    }
    __syncwarp();
    return loads;
  }
  CUTLASS_DEVICE auto load_tail(typename Base::LoadPipeline,
                                typename Base::LoadPipelineState loads) {
    if (threadIdx.x == kSendingThread) sender_.finish(scatter_, stamps_);
    __syncwarp();
    return loads;
  }

  template <class Problem, class TileShape, class Coordinates, class Accumulators, class Mma>
  CUTLASS_DEVICE auto store(typename Base::LoadPipeline, typename Base::LoadPipelineState loads,
                            typename Base::StorePipeline, typename Base::StorePipelineState stores,
                            Problem, TileShape shape, Coordinates at,
                            Accumulators const& accumulators, Mma mma, int thread, TensorStorage&,
                            int = -1) {
    static_assert(int(cute::size(Mma{})) == kWarpgroup);
    constexpr int kPacks = int(cute::size(Accumulators{})) / 8;
    // What follows from the thread's number must not be kept in registers through the product.
    asm volatile("" : "+r"(thread));
    const int row = cute::get<0>(at), column = cute::get<1>(at);
    const Scatter::Place place = scatter_.place_of(row, column);
    const bool others = is_others(column, place);
    stamps_.stamp(at, thread, &TileRecord::store_begin);
    if (others && kDirect) {
      send(accumulators, place, thread, at);
    } else if (others) {
      keep(accumulators, scatter_.outbox_at(place, kPacks * kPackBytes), thread);
      hand_over(place, thread);
    } else if (scatter_.is_inside(column)) {
      keep(accumulators, part_of(scatter_.staging.rank, place.tile, kPacks), thread);
      const auto places =
          mma.get_slice(thread).partition_C(cute::make_identity_tensor(cute::take<0, 2>(shape)));
      add_parts<kPacks>(place.tile, thread, at, [&](int i) {
        return Position{place.row * int(cute::size<0>(shape)) + int(cute::get<0>(places(i))),
                        column * int(cute::size<1>(shape)) + int(cute::get<1>(places(i)))};
      });
    }
    stamps_.stamp(at, thread, &TileRecord::store_end);
    stamps_.count(at, thread, &TileRecord::stores);
    stamps_.product(at, thread);
    if (thread == 0 && (kDirect || !others)) scatter_.count_tile();
    return cute::make_tuple(loads, stores);
  }

 private:
  // The first of the producers' third warp.
  static constexpr int kSendingThread = 64;
  static constexpr int kPackBytes = kWarpgroup * int(sizeof(Pack));  // of all threads

  // Barriers of one warpgroup; CUTLASS leaves these numbers to its users.
  CUTLASS_DEVICE static void sync_warpgroup() {
    cutlass::arch::NamedBarrier::sync(kWarpgroup, cutlass::canonical_warp_group_idx());
  }
  CUTLASS_DEVICE bool is_others(int column, Scatter::Place const& place) const {
    return scatter_.is_inside(column) && place.owner != scatter_.staging.rank;
  }
  /// What `source` sent of an own tile.
  CUTLASS_DEVICE std::byte* part_of(int source, int tile, int packs) const {
    return scatter_.staging_at(scatter_.staging.rank, source, tile, packs * kPackBytes);
  }

  /// Each thread reads an own tile's packs as it wrote them.
  template <class Accumulators>
  CUTLASS_DEVICE static void keep(Accumulators const& accumulators, std::byte* tile, int thread) {
    Pack* to = reinterpret_cast<Pack*>(tile) + thread;
    CUTLASS_PRAGMA_UNROLL
    for (int pack = 0; pack < int(cute::size(Accumulators{})) / 8; ++pack) {
      Floats values;
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < 8; ++e) values[e] = accumulators(pack * 8 + e);
      const Pack rounded = cutlass::NumericArrayConverter<Element, float, 8>{}(values);
      reinterpret_cast<uint4*>(to)[pack * kWarpgroup] = reinterpret_cast<const uint4&>(rounded);
    }
  }

  /// Straight to the owner, who has entered by then.
  template <class Accumulators, class Coordinates>
  CUTLASS_DEVICE void send(Accumulators const& accumulators, Scatter::Place const& place,
                           int thread, Coordinates const& at) {
    constexpr int kPacks = int(cute::size(Accumulators{})) / 8;
    const int rank = scatter_.staging.rank;
    if (!(entered_ >> place.owner & 1)) {
      stamps_.stamp(at, thread, &TileRecord::held_begin);
      if (thread == 0) {
        wait_signal(scatter_.signals_of(rank) + scatter_.entered + place.owner,
                    scatter_.this_epoch(), scatter_.watch, OpId::gemm_rs, place.owner);
      }
      sync_warpgroup();
      stamps_.stamp(at, thread, &TileRecord::held_end);
      entered_ |= 1u << place.owner;
    }
    stamps_.stamp(at, thread, &TileRecord::wait_begin);
    std::byte* tile = scatter_.staging_at(place.owner, rank, place.tile, kPacks * kPackBytes);
    Pack* to = reinterpret_cast<Pack*>(tile) + thread;
    uint64_t next = nanoseconds();
    CUTLASS_PRAGMA_UNROLL
    for (int pack = 0; pack < kPacks; ++pack) {
      Floats values;
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < 8; ++e) values[e] = accumulators(pack * 8 + e);
      store_pack(to + pack * kWarpgroup,
                 cutlass::NumericArrayConverter<Element, float, 8>{}(values));
      next += uint64_t(scatter_.pace_ns);
      while (int64_t(nanoseconds() - next) < 0) __nanosleep(40);
    }
    sync_warpgroup();
    if (thread == 0) {
      release_signal(scatter_.landed_at(place.owner, rank, place.tile), scatter_.this_epoch());
    }
    stamps_.stamp(at, thread, &TileRecord::wait_end);
  }
  // In program order with the pauses between them.
  CUTLASS_DEVICE static void store_pack(Pack* to, Pack const& pack) {
    const auto& words = reinterpret_cast<const uint4&>(pack);
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words.x), "r"(words.y),
                 "r"(words.z), "r"(words.w)
                 : "memory");
  }

  /// Of a tile in the outbox to the warp that sends.
  CUTLASS_DEVICE void hand_over(Scatter::Place const& place, int thread) const {
    fence_for_bulk_copies();
    sync_warpgroup();
    if (thread == 0) release_on_this_gpu(scatter_.ready_at(place), scatter_.this_epoch());
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
    const std::byte* slots = part_of(0, tile, kPacks) + thread * int(sizeof(Pack));
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
          const Position place = place_of((first + i) * 8 + e);
          if (place.column >= scatter_.n) continue;
          auto* out = static_cast<Element*>(scatter_.out) + int64_t(place.row) * scatter_.n;
          *reinterpret_cast<cutlass::Array<Element, 2>*>(out + place.column) =
              cutlass::NumericArrayConverter<Element, float, 2>{}({sum[e], sum[e + 1]});
        }
      }
    }
  }

  Scatter const& scatter_;
  Stamps stamps_;
  Sender& sender_;
  unsigned entered_ = 0;  // owners seen to have entered this call, by bit (kDirect)
};

}  // namespace tandem::gpu::fused
