// GEMM+RS as one persistent fused GEMM: tile stores overlap the main loops of later tiles (Hopper;
// bf16, f16, and e4m3 with a result in either). Tiles of a rank's GEMM that belong to its own shard
// are local, all others remote. A finished remote tile is stored, 64 columns at a time during the
// next tile's main loop, by TMA from shared memory directly into its owner's memory. An owner adds
// the received partial tiles, one per other rank, as extra steps of its local tiles' main loop,
// through the pipeline that loads x and the weight. No reduction follows the GEMM, no SM is
// reserved for communication, and a call is one launch.
//
// Stores are paced to the rate at which tiles finish: the columns of all blocks' tiles are spread
// over the next tile's k-blocks. In one burst they would saturate the link and stall the loads of
// their SMs (measured with serial collectives). If the link has no slack, local tiles are
// interleaved with remote ones to keep it busy until shortly before the end. Alternatively some
// remote tiles, those that their owners compute last, are first written to a local send buffer.
// A helper warp outside the GEMM sends them once its block has stored all its other
// remote tiles: under local tiles, when the link would otherwise idle.
//
// Alternatively all remote tiles are written to the send buffer and the copy engine sends them, one
// chunk of a shard at a time: a completed chunk sets a flag in memory that the pushing stream waits
// for. This disturbs the GEMM less than stores do, but costs some 5 us per chunk in addition to its
// bytes, 15 us until the first has arrived, and a graph launch on the host.
//
// The sum is in f32, in a fixed order: source by source, in ring order (schedule/ring.h), each
// after a share of the k-blocks, the last after all of them (schedule/slice_order.h); for e4m3 all
// sources come after the last k-block, as accumulators are scaled first. If a tile is split along K
// (schedule/wave_split.h; with a result in bf16), the split-K partials, stored as hi + lo, are
// added last. Every other tile of a cluster traverses K in the opposite direction, for L2 reuse.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <vector>

#include "comm/device/device_signal.h"
#include "gemm/cuda/scale.h"
#include "gemm/cuda/tile_log.h"
#include "overlap/scatter/cuda/rs_shape.h"

namespace tandem::gpu {

/// Delivery of a call's remote tiles to their owners.
struct TileDelivery {
  int chunks = 0;  ///< chunks of a shard sent by the copy engine: more of them start and finish
                   ///< earlier, but cost more copies; 0: stores
  bool between = false;  ///< stores: local tiles are interleaved with remote ones, not last
  int later = 0;  ///< stores: one of so many tiles is deferred and sent under local ones; 0: none
};
/// All deliveries. The first is used if nothing is measured; the rest are in order of host cost.
constexpr TileDelivery kTileDeliveries[] = {{0, false}, {0, false, 6}, {0, true}, {2}, {4}};

struct FusedRsArgs {
  const void* x;         ///< [m, k]
  const void* weight;    ///< [n, k], or [k, n] with weight_kn
  void* out;             ///< [this rank's rows, n]
  ScalePointers scales;  ///< e4m3
  /// Shards by owner and by source, one column of tiles after another: [ranks, column_tiles(),
  /// shard_rows(), tile_columns()], and one rank less. `send_buffer` is local; if tiles
  /// are stored, it holds only deferred ones and those whose wait for the owner timed out.
  /// `received`: partials from the other ranks.
  void* send_buffer;
  const void* received;
  PeerTable staging;  ///< signals start at `ready_flags` (ready flags), by rank; `arrived`, by
                      ///< source, then by kMaxChunks; `arrived_tiles`, by source, then by slice
  int ready_flags, arrived, arrived_tiles;
  CallCounter* calls;  ///< counts one reader per block
  /// For copy-engine pushes, by ring step, then by kMaxChunks: `counted` tiles, 0 between calls;
  /// `ready` flags of complete chunks, set to 1 and reset by the pushing stream; `sending`, the
  /// value for their signal: the call's epoch, or 0 if the wait for their owner timed out.
  unsigned *counted, *ready;
  uint64_t* sending;
  int delivery;  ///< index into deliveries()
  Deadline deadline;
  TileLog timeline{};          ///< for kernels that record
  const void* bias = nullptr;  ///< [n], or null; only any-rows kernels add one
};

/// Host-side launch state is cached and reused while the operands stay the same.
class FusedRsKernel {
 public:
  static constexpr int kMaxChunks = 4;
  static constexpr int64_t kMinK = FusedRsShape::kMinK;

  virtual ~FusedRsKernel() = default;
  /// The subset of kTileDeliveries that the shape supports.
  virtual const std::vector<TileDelivery>& deliveries() const = 0;
  virtual RecordedTiles recorded_tiles() const = 0;
  /// With copy-engine pushes, the caller must enqueue them next, on other streams: for every chunk
  /// of every remote shard, in ring order, a wait for its `ready` flag, which is reset, a copy to
  /// the owner's `received`, and a copy of its `sending` value to the owner's signal. Throws
  /// DeviceError.
  virtual void launch(const FusedRsArgs& args, cudaStream_t stream) = 0;
};

/// Throws DeviceError. `fp8`: e4m3.
std::unique_ptr<FusedRsKernel> make_fused_rs(const FusedRsShape& shape);
std::unique_ptr<FusedRsKernel> make_fused_rs_fp8(const FusedRsShape& shape);
/// Variants for any M with at least one row per rank, and an optional bias. They support no
/// delivery with chunks.
std::unique_ptr<FusedRsKernel> make_fused_rs_any_rows(const FusedRsShape& shape);
/// Called by the two for bf16 and f16 if the shape has weight_kn, which the others do not support.
std::unique_ptr<FusedRsKernel> make_fused_rs_kn(const FusedRsShape& shape);
std::unique_ptr<FusedRsKernel> make_fused_rs_any_rows_kn(const FusedRsShape& shape);
std::unique_ptr<FusedRsKernel> make_fused_rs_fp8_any_rows(const FusedRsShape& shape);

}  // namespace tandem::gpu
