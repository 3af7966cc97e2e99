// Couriers by ordinary stores: a warp of every block holds a piece of 2 KiB at once. One fence
// covers what a block sends of a chunk, and stops the warp until all of it has arrived; nothing
// else does, which makes them the faster ones where products are short.
#pragma once

#include "overlap/cuda/shard_courier.cuh"

namespace tandem::gpu::fused {

class StoreCourier : public ShardCourier {
  static constexpr int kPieceBytes = piece_bytes_of(Courier::stores);

 public:
  static constexpr Courier kKind = Courier::stores;

  /// Needs nothing in shared memory.
  struct Storage {};

  using ShardCourier::ShardCourier;

  /// By one warp of every block, once in a call.
  CUTLASS_DEVICE void carry(int lane, Storage&) const {
    wait_for_stops(lane);
    const schedule::AgCourierOrder order{route_.rows, route_.chunks, blocks()};
    const unsigned interval = pause(kPieceBytes);
    uint64_t next = first_time(interval);
    unsigned of_chunk = 0;
    schedule::CourierPiece piece = schedule::first_piece(order, block());
    CUTLASS_PRAGMA_NO_UNROLL
    while (piece.chunk < order.chunks) {
      carry_piece(piece.row, piece.chunk * kPieceBytes + lane * 16, next);
      next += interval;
      ++of_chunk;
      if (schedule::ends_chunk(order, piece)) {
        __syncwarp();
        if (lane < route_.stops) add_signal(of_stop(route_.arrived, lane) + piece.chunk, of_chunk);
        of_chunk = 0;
      }
      piece = schedule::next_piece(order, piece);
    }
    __syncwarp();
    if (lane == 0) count(2 * unsigned(blocks()));
  }

 private:
  static constexpr int kAtOnce = kPieceBytes / (32 * 16);  // packs that a lane holds

  // Of `row`, from byte `column` on every lane; not before `when`.
  CUTLASS_DEVICE void carry_piece(int row, int column, uint64_t when) const {
    const int64_t at = int64_t(row) * route_.row_bytes + column;
    const int left = route_.row_bytes - column;
    uint4 packs[kAtOnce];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      if (i * 512 < left) {
        packs[i] = __ldcg(reinterpret_cast<const uint4*>(route_.from + at + i * 512));
      }
    }
    while (int64_t(nanoseconds() - when) < 0) __nanosleep(40);
    CUTLASS_PRAGMA_UNROLL
    for (int stop = 0; stop < kMaxGpus; ++stop) {
      if (stop >= route_.stops) break;
      std::byte* to = route_.to[stop] + at;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        if (i * 512 < left) store(to + i * 512, packs[i]);
      }
    }
  }

  // In program order with the pauses between them.
  CUTLASS_DEVICE static void store(std::byte* to, uint4 const& pack) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(pack.x), "r"(pack.y),
                 "r"(pack.z), "r"(pack.w)
                 : "memory");
  }

  // Everything that the warp stored before is visible first.
  CUTLASS_DEVICE static void add_signal(uint64_t* signal, unsigned parts) {
    asm volatile("fence.acq_rel.sys;\n\tred.relaxed.sys.global.add.u64 [%0], %1;" ::"l"(signal),
                 "l"(uint64_t(parts))
                 : "memory");
  }
};

}  // namespace tandem::gpu::fused
