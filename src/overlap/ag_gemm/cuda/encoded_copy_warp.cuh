// Copy warps of a persistent kernel whose shards are sent in a wire format. A warp of every block
// encodes its chunks of the local shard, once, and stores them into the peers' inboxes. It then
// decodes its share of the received rows, source by source in the order in which tiles read them,
// into the gathered rows, and counts them in the arrival flags that readers wait for. Meanwhile the
// other warps multiply, starting with the local rows, which they read uncompressed.
#pragma once

#include "codec/cuda/encoded_chunk.cuh"
#include "overlap/ag_gemm/cuda/encoded_route.h"
#include "overlap/contract/cuda/wait_ids.h"
#include "overlap/gather/cuda/shard_copy_warp.cuh"
#include "schedule/ring.h"

namespace tandem::gpu::fused {

template <class Encoded>
class EncodedCopyWarp : public ShardCopyWarp {
 public:
  using Route = EncodedShardRoute;
  struct Storage {};
  static_assert(2 * Encoded::kElements == kCopyItemBytes);
  static_assert(Encoded::kBytes ==
                encoded_chunk_bytes(Encoded::kWords, kWireBlock / Encoded::kScales));

  CUTLASS_DEVICE explicit EncodedCopyWarp(Route const& route)
      : ShardCopyWarp(route), route_(route) {}

  /// Called by one warp of every block, once per call.
  CUTLASS_DEVICE void carry(int lane, Storage&) const {
    const schedule::CopyAssignment assignment =
        schedule::assignment_of({route_.rows, route_.chunks, blocks(), route_.groups}, block());
    // A late peer may still read the last call's data: nothing is sent.
    if (!wait_for_targets(lane)) return finish(lane);
    send_all(assignment, lane);
    const uint64_t wanted = this_epoch(route_.calls) * uint64_t(route_.rows);
    for (int step = 1; step < route_.size; ++step) {
      decode_all(assignment, schedule::ag_source(route_.rank, route_.size, step), wanted, lane);
    }
    finish(lane);
  }

 private:
  /// Offset in a row of this lane's values of a chunk; `has`: whether the row extends that far.
  CUTLASS_DEVICE int offset(schedule::CopyItem item, int lane) const {
    return item.chunk * kCopyItemBytes + lane / kQuad * (2 * kWireBlock) + lane % kQuad * 8;
  }
  CUTLASS_DEVICE bool has(schedule::CopyItem item, int lane) const {
    return offset(item, lane) < route_.row_bytes;
  }
  CUTLASS_DEVICE int64_t chunk_offset(schedule::CopyItem item) const {
    return (int64_t(item.chunk) * route_.rows + item.row) * Encoded::kBytes;
  }

  CUTLASS_DEVICE void prefetch(schedule::CopyItem item, int lane) const {
    const int at = item.chunk * kCopyItemBytes + lane * 128;
    if (lane >= kCopyItemBytes / 128 || item.chunk >= route_.chunks || at >= route_.row_bytes)
      return;
    const std::byte* from = route_.from + int64_t(item.row) * route_.row_bytes + at;
    asm volatile("prefetch.global.L1 [%0];" ::"l"(from));
  }

  CUTLASS_DEVICE void send_all(schedule::CopyAssignment const& assignment, int lane) const {
    schedule::CopyItem item = assignment.first;
    unsigned rows = 0;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = 0; i < assignment.num_items; ++i) {
      const schedule::CopyItem next = schedule::next_item(assignment, item);
      prefetch(next, lane);
      send(item, lane);
      ++rows;
      if (schedule::ends_chunk(assignment, item)) {
        __syncwarp();
        // Ordered after all stores of the warp.
        if (lane < route_.targets) release_add(route_.arrived[lane] + item.chunk, rows);
        rows = 0;
      }
      item = next;
    }
  }

  CUTLASS_DEVICE void send(schedule::CopyItem item, int lane) const {
    float x[kLaneValues] = {};
    const bool on = has(item, lane);
    if (on) {
      const std::byte* from =
          route_.from + int64_t(item.row) * route_.row_bytes + offset(item, lane);
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
    Encoded encoded;
    encoded.encode(x, route_.limit, lane);
    if (!on) return;
    const int64_t at = chunk_offset(item);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int stop = 0; stop < route_.targets; ++stop) encoded.store(route_.to[stop] + at, lane);
  }

  /// Decodes this block's share of the rows received from `source`.
  CUTLASS_DEVICE void decode_all(schedule::CopyAssignment const& assignment, int source,
                                 uint64_t wanted, int lane) const {
    const std::byte* const inbox =
        route_.inbox + int64_t(source) * route_.chunks * route_.rows * Encoded::kBytes;
    std::byte* const rows_at = route_.gathered + int64_t(source) * route_.rows * route_.row_bytes;
    schedule::CopyItem item = assignment.first;
    unsigned rows = 0;
    int here = -1;  // the chunk last waited for
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = 0; i < assignment.num_items; ++i) {
      const int number = source * route_.chunks + item.chunk;
      if (item.chunk != here && !wait_for_chunk(source, number, wanted, lane)) return;
      here = item.chunk;
      if (has(item, lane)) {
        float x[kLaneValues];
        // Bypasses L1, as another GPU may have stored it.
        Encoded::for_values_of(
            inbox + chunk_offset(item), lane, [](const auto* from) { return __ldcg(from); },
            [&](int e, float code, float scale) { x[e] = __fmul_rn(code, scale); });
        store_halves<DType::bf16>(
            reinterpret_cast<uint16_t*>(rows_at + int64_t(item.row) * route_.row_bytes +
                                        offset(item, lane)),
            x);
      }
      ++rows;
      if (schedule::ends_chunk(assignment, item)) {
        __syncwarp();
        if (lane == 0) release_add(route_.decoded + number, rows);
        rows = 0;
      }
      item = schedule::next_item(assignment, item);
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
