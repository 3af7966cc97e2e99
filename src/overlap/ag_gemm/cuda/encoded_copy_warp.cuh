// Copy warps of a persistent kernel whose shards are sent in a wire format. A warp of every block
// encodes its chunks of the local shard, once, and stores them into the peers' inboxes. It then
// decodes its share of the received rows, source by source in the order in which tiles read them,
// into the gathered rows, and counts them in the arrival flags that readers wait for. Meanwhile the
// other warps multiply, starting with the local rows, which they read unencoded.
#pragma once

#include "codec/cuda/piece.cuh"
#include "overlap/ag_gemm/cuda/encoded_route.h"
#include "overlap/contract/cuda/wait_ids.h"
#include "overlap/gather/cuda/shard_copy_warp.cuh"
#include "schedule/ring.h"

namespace tandem::gpu::fused {

template <class Piece>
class EncodedCopyWarp : public ShardCopyWarp {
 public:
  using Route = EncodedShardRoute;
  struct Storage {};
  static_assert(2 * Piece::kElements == kCopyItemBytes);
  static_assert(Piece::kBytes == encoded_piece_bytes(Piece::kWords, kWireBlock / Piece::kScales));

  CUTLASS_DEVICE explicit EncodedCopyWarp(Route const& route)
      : ShardCopyWarp(route), route_(route) {}

  /// Called by one warp of every block, once per call.
  CUTLASS_DEVICE void carry(int lane, Storage&) const {
    const schedule::CopyAssignment assignment =
        schedule::assignment_of({route_.rows, route_.chunks, blocks(), route_.groups}, block());
    // A late peer may still read the last call's data: nothing is sent.
    if (!wait_for_stops(lane)) return finish(lane);
    send_all(assignment, lane);
    const uint64_t wanted = this_epoch(route_.calls) * uint64_t(route_.rows);
    for (int step = 1; step < route_.size; ++step) {
      decode_all(assignment, schedule::ag_source(route_.rank, route_.size, step), wanted, lane);
    }
    finish(lane);
  }

 private:
  /// Offset in a row of this lane's values of a chunk; `has`: whether the row extends that far.
  CUTLASS_DEVICE int offset(schedule::CopyItem piece, int lane) const {
    return piece.chunk * kCopyItemBytes + lane / kQuad * (2 * kWireBlock) + lane % kQuad * 8;
  }
  CUTLASS_DEVICE bool has(schedule::CopyItem piece, int lane) const {
    return offset(piece, lane) < route_.row_bytes;
  }
  CUTLASS_DEVICE int64_t piece_at(schedule::CopyItem piece) const {
    return (int64_t(piece.chunk) * route_.rows + piece.row) * Piece::kBytes;
  }

  CUTLASS_DEVICE void prefetch(schedule::CopyItem piece, int lane) const {
    const int at = piece.chunk * kCopyItemBytes + lane * 128;
    if (lane >= kCopyItemBytes / 128 || piece.chunk >= route_.chunks || at >= route_.row_bytes)
      return;
    const std::byte* from = route_.from + int64_t(piece.row) * route_.row_bytes + at;
    asm volatile("prefetch.global.L1 [%0];" ::"l"(from));
  }

  CUTLASS_DEVICE void send_all(schedule::CopyAssignment const& assignment, int lane) const {
    schedule::CopyItem piece = assignment.first;
    unsigned rows = 0;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = 0; i < assignment.pieces; ++i) {
      const schedule::CopyItem next = schedule::next_piece(assignment, piece);
      prefetch(next, lane);
      send(piece, lane);
      ++rows;
      if (schedule::ends_chunk(assignment, piece)) {
        __syncwarp();
        // Ordered after all stores of the warp.
        if (lane < route_.stops) release_add(route_.arrived[lane] + piece.chunk, rows);
        rows = 0;
      }
      piece = next;
    }
  }

  CUTLASS_DEVICE void send(schedule::CopyItem piece, int lane) const {
    float x[kLaneValues] = {};
    const bool on = has(piece, lane);
    if (on) {
      const std::byte* from =
          route_.from + int64_t(piece.row) * route_.row_bytes + offset(piece, lane);
      uint2 four[kVectors];
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        four[j] = __ldg(reinterpret_cast<const uint2*>(from) + kQuad * j);
      }
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const float2 low = widened(DType::bf16, four[j].x), high = widened(DType::bf16, four[j].y);
        x[4 * j] = low.x, x[4 * j + 1] = low.y, x[4 * j + 2] = high.x, x[4 * j + 3] = high.y;
      }
    }
    Piece encoded;
    encoded.encode(x, route_.limit, lane);
    if (!on) return;
    const int64_t at = piece_at(piece);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int stop = 0; stop < route_.stops; ++stop) encoded.store(route_.to[stop] + at, lane);
  }

  /// Decodes this block's share of the rows received from `source`.
  CUTLASS_DEVICE void decode_all(schedule::CopyAssignment const& assignment, int source,
                                 uint64_t wanted, int lane) const {
    const std::byte* const inbox =
        route_.inbox + int64_t(source) * route_.chunks * route_.rows * Piece::kBytes;
    std::byte* const rows_at = route_.gathered + int64_t(source) * route_.rows * route_.row_bytes;
    schedule::CopyItem piece = assignment.first;
    unsigned rows = 0;
    int here = -1;  // the chunk last waited for
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = 0; i < assignment.pieces; ++i) {
      const int number = source * route_.chunks + piece.chunk;
      if (piece.chunk != here && !wait_for_chunk(source, number, wanted, lane)) return;
      here = piece.chunk;
      if (has(piece, lane)) {
        float x[kLaneValues];
        // Bypasses L1, as another GPU may have stored it.
        Piece::for_values_of(
            inbox + piece_at(piece), lane, [](const auto* from) { return __ldcg(from); },
            [&](int e, float code, float scale) { x[e] = __fmul_rn(code, scale); });
        store_halves<DType::bf16>(
            reinterpret_cast<uint16_t*>(rows_at + int64_t(piece.row) * route_.row_bytes +
                                        offset(piece, lane)),
            x);
      }
      ++rows;
      if (schedule::ends_chunk(assignment, piece)) {
        __syncwarp();
        if (lane == 0) release_add(route_.decoded + number, rows);
        rows = 0;
      }
      piece = schedule::next_piece(assignment, piece);
    }
  }

  CUTLASS_DEVICE bool wait_for_chunk(int source, int number, uint64_t wanted, int lane) const {
    bool came = true;
    if (lane == 0) {
      came = wait_signal(route_.received + number, wanted, route_.deadline, kAgGemmWait, source);
    }
    return __shfl_sync(0xffffffff, came, 0);
  }

  Route const& route_;
};

}  // namespace tandem::gpu::fused
