// Couriers by bulk copies: one thread of every block, a piece of 1 KiB at a time through shared
// memory. It does not wait for what it sends: it learns some pieces later that one has arrived, and
// signals then. But its copies wait their turn behind the product's loads.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cute/arch/copy_sm90_tma.hpp>

#include "overlap/cuda/shard_courier.cuh"

namespace tandem::gpu::fused {

class BulkCourier : public ShardCourier {
  static constexpr int kPieceBytes = piece_bytes_of(Courier::bulk);

 public:
  static constexpr Courier kKind = Courier::bulk;
  static constexpr int kBuffers = 16;
  static constexpr int kAhead = 4;  // pieces that are read before their turn to leave

  /// In shared memory.
  struct Storage {
    alignas(128) std::byte pieces[kBuffers][kPieceBytes];
    alignas(8) uint64_t full[kBuffers];
  };

  using ShardCourier::ShardCourier;

  /// By one warp of every block, once in a call.
  CUTLASS_DEVICE void carry(int lane, Storage& storage) const {
    if (lane == 0) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kBuffers; ++i) cutlass::arch::ClusterBarrier::init(&storage.full[i], 1);
      cutlass::arch::fence_barrier_init();
      cutlass::arch::fence_view_async_shared();
    }
    wait_for_stops(lane);
    if (lane != 0) return;
    serve(storage);
    count(2 * unsigned(blocks()));
  }

 private:
  // Pieces that are on their way when the one before them is known to have arrived. Tiles wait for
  // the first chunk more than the wire for the next pieces.
  static constexpr int kUnderWay = 3, kFirstUnderWay = 0;
  // A buffer is filled again when what it held has arrived, without a wait of its own.
  static_assert(kBuffers > kAhead + kUnderWay);

  CUTLASS_DEVICE void serve(Storage& storage) const {
    const schedule::AgCourierOrder order{route_.rows, route_.chunks, blocks()};
    const int pieces = schedule::pieces_of(order, block());
    const unsigned interval = pause(kPieceBytes);
    uint64_t next = first_time(interval);
    schedule::CourierPiece coming = schedule::first_piece(order, block()), leaving = coming,
                           landing = coming;
    int landed = 0;
    unsigned of_chunk = 0;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int step = -kAhead; step <= pieces; ++step) {
      if (step + kAhead < pieces) {
        fetch(coming, storage, uint32_t(step + kAhead));
        coming = schedule::next_piece(order, coming);
      }
      if (step >= 0 && step < pieces) {
        send(leaving, storage, uint32_t(step), next);
        leaving = schedule::next_piece(order, leaving);
        next += interval;
      }
      const int under_way = step == pieces || landing.chunk == 0 ? kFirstUnderWay : kUnderWay;
      const int due = min(step, pieces - 1) - under_way;
      if (landed <= due) wait_for_all_but(under_way);
      CUTLASS_PRAGMA_NO_UNROLL
      for (; landed <= due; ++landed) {
        ++of_chunk;
        if (schedule::ends_chunk(order, landing)) {
          signal(landing.chunk, of_chunk);
          of_chunk = 0;
        }
        landing = schedule::next_piece(order, landing);
      }
    }
  }

  CUTLASS_DEVICE int64_t place_of(schedule::CourierPiece piece) const {
    return int64_t(piece.row) * route_.row_bytes + piece.chunk * kPieceBytes;
  }
  CUTLASS_DEVICE int bytes_of(schedule::CourierPiece piece) const {
    return min(kPieceBytes, route_.row_bytes - piece.chunk * kPieceBytes);
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

  // Copies of this thread, complete and visible to it but for the `pending` latest.
  CUTLASS_DEVICE static void wait_for_all_but(int pending) {
    if (pending == kUnderWay) return wait_for_all_but<kUnderWay>();
    wait_for_all_but<kFirstUnderWay>();
  }
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
};

}  // namespace tandem::gpu::fused
