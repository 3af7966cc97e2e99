// The couriers of a persistent kernel: one thread of every block carries its pieces of the own
// shard (schedule/ag_courier_order.h) into the peers' gathered buffers at the pace of the wire,
// while the others multiply. A piece is read once, into shared memory, for all stops.
//
// Bulk copies: the thread does not wait for what it sends. It learns some pieces later that one has
// arrived, and signals then; a fence behind ordinary stores would stop it for microseconds. Each
// copy waits its turn behind the product's loads, so that many short ones are slow.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cute/arch/copy_sm90_tma.hpp>

#include "comm/nccl/device_signal.cuh"
#include "overlap/cuda/shard_route.h"
#include "schedule/ag_courier_order.h"

namespace tandem::gpu::fused {

class ShardCourier {
 public:
  static constexpr int kBuffers = 8;
  static constexpr int kAhead = 4;     // pieces that are read before their turn to leave
  static constexpr int kUnderWay = 3;  // that were sent since the one that must have arrived

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
    if (lane < route_.stops) {
      wait_signal(of_stop(route_.entered, lane), this_epoch(), route_.watch, OpId::ag_gemm,
                  of_stop(route_.rank_of, lane));
    }
    __syncwarp();
    if (lane != 0) return;
    serve(storage);
    count(2 * unsigned(blocks()));
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
  static_assert(kBuffers > kAhead + kUnderWay);

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

  CUTLASS_DEVICE void serve(Storage& storage) const {
    const schedule::AgCourierOrder order{route_.rows, route_.chunks, blocks()};
    const int pieces = schedule::pieces_of(order, block());
    const unsigned interval = pause();
    // Blocks send one after another, so that none of them meets a full wire.
    uint64_t next = nanoseconds() + interval / unsigned(blocks()) * unsigned(block());
    schedule::CourierPiece coming = schedule::first_piece(order, block()), leaving = coming,
                           landing = coming;
    unsigned landed = 0;  // of the chunk
    CUTLASS_PRAGMA_NO_UNROLL
    for (int step = -kAhead; step < pieces + kUnderWay; ++step) {
      if (step + kAhead < pieces) {
        fetch(coming, storage, uint32_t(step + kAhead));
        coming = schedule::next_piece(order, coming);
      }
      if (step >= 0 && step < pieces) {
        send(leaving, storage, uint32_t(step), next);
        leaving = schedule::next_piece(order, leaving);
        next += interval;
      }
      if (step < kUnderWay) continue;
      if (step < pieces) {
        wait_for_all_but<kUnderWay>();
      } else {
        wait_for_all_but<0>();
      }
      ++landed;
      if (schedule::ends_chunk(order, landing)) {
        signal(landing.chunk, landed);
        landed = 0;
      }
      landing = schedule::next_piece(order, landing);
    }
  }

  // From one piece of a block to its next, in ns.
  CUTLASS_DEVICE unsigned pause() const {
    if (route_.bytes_per_ns == 0) return 0;
    return unsigned(ShardRoute::kPieceBytes * route_.stops * blocks()) /
           unsigned(route_.bytes_per_ns);
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
  CUTLASS_DEVICE void send(schedule::CourierPiece piece, Storage& storage, uint32_t number,
                           uint64_t when) const {
    const uint32_t buffer = number % kBuffers;
    cutlass::arch::ClusterBarrier::wait(&storage.full[buffer], number / kBuffers % 2);
    while (int64_t(nanoseconds() - when) < 0) __nanosleep(32);
    CUTLASS_PRAGMA_UNROLL
    for (int stop = 0; stop < kMaxGpus; ++stop) {
      if (stop >= route_.stops) break;
      cute::SM90_BULK_COPY_S2G::copy(storage.pieces[buffer], route_.to[stop] + place_of(piece),
                                     bytes_of(piece));
    }
    cute::tma_store_arrive();
  }

  // Copies of this thread, complete and visible to it but for the latest ones.
  template <int kPending>
  CUTLASS_DEVICE static void wait_for_all_but() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
  }

  // Everything that has arrived is visible first.
  CUTLASS_DEVICE void signal(int chunk, unsigned parts) const {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
    CUTLASS_PRAGMA_UNROLL
    for (int stop = 0; stop < kMaxGpus; ++stop) {
      if (stop >= route_.stops) break;
      asm volatile("red.relaxed.sys.global.add.u64 [%0], %1;" ::"l"(route_.arrived[stop] + chunk),
                   "l"(uint64_t(parts))
                   : "memory");
    }
  }

  ShardRoute const& route_;
};

}  // namespace tandem::gpu::fused
