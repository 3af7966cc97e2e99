// The couriers of a persistent kernel: one thread of every block carries its pieces of the own
// shard (schedule/ag_courier_order.h) into the peers' gathered buffers at the pace of the wire,
// while the others multiply. A piece is read once, into shared memory, for all stops that are
// served together.
//
// Bulk copies: the thread does not wait for what it sends. It learns some pieces later that one has
// arrived, and signals then; a fence behind ordinary stores would stop it for microseconds.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cute/arch/copy_sm90_tma.hpp>

#include "comm/nccl/device_signal.cuh"
#include "overlap/cuda/shard_route.h"
#include "schedule/ag_courier_order.h"

namespace tandem::gpu::fused {

class ShardCourier {
 public:
  static constexpr int kBuffers = 16;
  static constexpr int kAhead = 4;  // pieces that are read before their turn to leave

  /// In shared memory.
  struct Storage {
    alignas(128) std::byte pieces[kBuffers][ShardRoute::kPieceBytes];
    alignas(8) uint64_t full[kBuffers];
  };

  CUTLASS_DEVICE explicit ShardCourier(ShardRoute const& route) : route_(route) {}

  /// By one thread of the grid: what the peers send now overwrites nothing that is still read.
  CUTLASS_DEVICE void enter() const {
    const uint64_t epoch = this_epoch();
    asm volatile("fence.acq_rel.sys;" ::: "memory");
    CUTLASS_PRAGMA_UNROLL
    for (int stop = 0; stop < kMaxGpus; ++stop) {
      if (stop >= route_.stops) break;
      asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(route_.enter[stop]), "l"(epoch)
                   : "memory");
    }
  }

  /// By one warp of every block, once in a call.
  CUTLASS_DEVICE void carry(int lane, Storage& storage) const {
    if (lane == 0) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kBuffers; ++i) cutlass::arch::ClusterBarrier::init(&storage.full[i], 1);
      cutlass::arch::fence_barrier_init();
      cutlass::arch::fence_view_async_shared();
    }
    uint32_t fetched = 0;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int first = 0; first < route_.stops; first += route_.at_once) {
      const int last = min(first + route_.at_once, route_.stops);
      const int mine = first + lane;  // the stop that this lane waits for
      if (mine < last) {
        wait_signal(of_stop(route_.entered, mine), this_epoch(), route_.watch, OpId::ag_gemm,
                    of_stop(route_.rank_of, mine));
      }
      __syncwarp();
      if (lane == 0) fetched = serve(first, last, storage, fetched);
    }
    if (lane == 0) count(2 * unsigned(blocks()));
  }

  /// By each of the `readers` warps of the grid that read the epoch, once it has: the last one
  /// advances it.
  CUTLASS_DEVICE void count(unsigned readers) const {
    if (atomicAdd(route_.done, 1u) != readers - 1) return;
    *route_.done = 0;
    *route_.epoch += 1;
  }

 private:
  // A buffer is filled again when what it held has arrived, without a wait of its own.
  static_assert(kBuffers > kAhead + ShardRoute::kMostUnderWay);

  CUTLASS_DEVICE static int blocks() { return int(gridDim.x * gridDim.y); }
  CUTLASS_DEVICE static int block() { return int(blockIdx.x + gridDim.x * blockIdx.y); }
  CUTLASS_DEVICE uint64_t this_epoch() const {
    return *static_cast<const volatile uint64_t*>(route_.epoch) + 1;
  }

  // Indexing the kernel's parameters by a variable would copy them to every thread's stack.
  template <class T>
  CUTLASS_DEVICE static T of_stop(T const (&values)[kMaxGpus], int stop) {
    T value = values[0];
    CUTLASS_PRAGMA_UNROLL
    for (int s = 1; s < kMaxGpus; ++s) value = s == stop ? values[s] : value;
    return value;
  }

  // The block's pieces to stops from `first` until before `last`; `fetched` were before. Returns
  // how many are now.
  CUTLASS_DEVICE uint32_t serve(int first, int last, Storage& storage, uint32_t fetched) const {
    const schedule::AgCourierOrder order{route_.rows, route_.chunks, blocks()};
    const int pieces = schedule::pieces_of(order, block());
    const unsigned interval = pause(last - first);
    // Blocks send one after another, so that none of them meets a full wire.
    uint64_t next = nanoseconds() + interval / unsigned(blocks()) * unsigned(block());
    schedule::CourierPiece coming = schedule::first_piece(order, block()), leaving = coming,
                           landing = coming;
    int landed = 0;
    unsigned of_chunk = 0;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int step = -kAhead; step <= pieces; ++step) {
      if (step + kAhead < pieces) {
        fetch(coming, storage, fetched + uint32_t(step + kAhead));
        coming = schedule::next_piece(order, coming);
      }
      if (step >= 0 && step < pieces) {
        send(leaving, first, last, storage, fetched + uint32_t(step), next);
        leaving = schedule::next_piece(order, leaving);
        next += interval;
      }
      // Tiles wait for the first chunk more than the wire for the next pieces.
      const int under_way = step == pieces       ? 0
                            : landing.chunk == 0 ? min(route_.under_way, route_.first_under_way)
                                                 : route_.under_way;
      const int due = min(step, pieces - 1) - under_way;
      if (landed <= due) wait_for_all_but(under_way);
      CUTLASS_PRAGMA_NO_UNROLL
      for (; landed <= due; ++landed) {
        ++of_chunk;
        if (schedule::ends_chunk(order, landing)) {
          signal(landing.chunk, of_chunk, first, last);
          of_chunk = 0;
        }
        landing = schedule::next_piece(order, landing);
      }
    }
    return fetched + uint32_t(pieces);
  }

  // From one piece of a block to its next, in ns.
  CUTLASS_DEVICE unsigned pause(int stops) const {
    if (route_.bytes_per_ns == 0) return 0;
    return unsigned(ShardRoute::kPieceBytes * stops * blocks()) / unsigned(route_.bytes_per_ns);
  }

  CUTLASS_DEVICE int64_t place_of(schedule::CourierPiece piece) const {
    return int64_t(piece.row) * route_.row_bytes + piece.chunk * ShardRoute::kPieceBytes;
  }
  CUTLASS_DEVICE int bytes_of(schedule::CourierPiece piece) const {
    return min(ShardRoute::kPieceBytes, route_.row_bytes - piece.chunk * ShardRoute::kPieceBytes);
  }

  CUTLASS_DEVICE void fetch(schedule::CourierPiece piece, Storage& storage, uint32_t number) const {
    const uint32_t buffer = number % kBuffers;
    cutlass::arch::ClusterTransactionBarrier::arrive_and_expect_tx(&storage.full[buffer],
                                                                   uint32_t(bytes_of(piece)));
    cute::SM90_BULK_COPY_G2S::copy(route_.from + place_of(piece), &storage.full[buffer],
                                   storage.pieces[buffer], bytes_of(piece));
  }

  // Not before `when`.
  CUTLASS_DEVICE void send(schedule::CourierPiece piece, int first, int last, Storage& storage,
                           uint32_t number, uint64_t when) const {
    const uint32_t buffer = number % kBuffers;
    cutlass::arch::ClusterBarrier::wait(&storage.full[buffer], number / kBuffers % 2);
    while (int64_t(nanoseconds() - when) < 0) __nanosleep(32);
    CUTLASS_PRAGMA_UNROLL
    for (int stop = 0; stop < kMaxGpus; ++stop) {
      if (stop < first || stop >= last) continue;
      cute::SM90_BULK_COPY_S2G::copy(storage.pieces[buffer], route_.to[stop] + place_of(piece),
                                     bytes_of(piece));
    }
    cute::tma_store_arrive();
  }

  // Copies of this thread, complete and visible to it but for the `pending` latest at most.
  CUTLASS_DEVICE static void wait_for_all_but(int pending) {
    if (pending >= 11) return wait_for_all_but<11>();
    if (pending >= 5) return wait_for_all_but<5>();
    if (pending >= 3) return wait_for_all_but<3>();
    if (pending >= 1) return wait_for_all_but<1>();
    wait_for_all_but<0>();
  }
  template <int kPending>
  CUTLASS_DEVICE static void wait_for_all_but() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
  }

  // Everything that has arrived is visible first.
  CUTLASS_DEVICE void signal(int chunk, unsigned parts, int first, int last) const {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
    CUTLASS_PRAGMA_UNROLL
    for (int stop = 0; stop < kMaxGpus; ++stop) {
      if (stop < first || stop >= last) continue;
      asm volatile("red.relaxed.sys.global.add.u64 [%0], %1;" ::"l"(route_.arrived[stop] + chunk),
                   "l"(uint64_t(parts))
                   : "memory");
    }
  }

  ShardRoute const& route_;
};

}  // namespace tandem::gpu::fused
