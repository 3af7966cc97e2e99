// GEMM+RS as one persistent GEMM whose tiles' stores overlap later tiles' main loops (Hopper; bf16,
// f16, and e4m3 with a result in either). Of the tiles of a rank's GEMM, those of its own shard's
// rows are local, all others remote. A finished remote tile is stored, 64 columns at a time under
// the next tile's main loop, by TMA from shared memory straight into its owner's memory. An owner
// adds what it received of its local tiles, a partial tile from each other rank, as more steps of
// their main loop, through the pipeline that loads x and the weight: nothing is summed after the
// GEMM, no SM does anything but multiply, and a call is one launch.
//
// Stores go at the pace at which tiles are finished: the columns of all blocks' tiles are spread
// over the next tile's k-blocks, since at one time they would fill the wire, and their SMs' loads
// would wait behind them (plain collectives showed that). Where the wire has no time to spare,
// local tiles come between the remote ones, so that it is busy until shortly before the end. Or
// some of the remote tiles, those that their owners compute last, go into this rank's outbox, a
// local send buffer, first. A warp that has no part in the GEMM sends them when its block has
// stored all its other tiles: under local ones, when the wire would idle.
//
// Or remote tiles go into this rank's outbox, and the copy engine takes them from there, a piece of
// a shard at a time: when one is complete, a word in memory says so, for which the stream that
// pushes it waits. It disturbs the GEMM less than stores do, but costs some 5 us for each piece
// beside its bytes, 15 until the first has arrived, and the host a graph.
//
// The sum is in f32, in an order that is fixed: source by source, in ring order (schedule/ring.h),
// each after a share of the k-blocks, the last one after all of them (schedule/adding_order.h), of
// e4m3 all sources, as accumulators are scaled first; then, where a tile is split along K
// (schedule/wave_split.h; with a result in bf16), the split-K partials, stored as hi + lo. Every
// other tile of a cluster goes through K in the opposite direction, for L2 reuse.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <vector>

#include "comm/device/device_signal.h"
#include "gemm/cuda/scale.h"
#include "gemm/cuda/tile_log.h"
#include "tandem/dtype.h"

namespace tandem::gpu {

/// What all calls of a rank's operator have in common; K is this rank's.
struct AddingShape {
  int64_t m, n, k;
  int rank, ranks;
  DType dtype, result;
  bool scaled_by_row = false;  ///< e4m3; else by one scale of x and of the weight

  /// A shard is filled up to a multiple of these rows, and to whole tiles of columns.
  static constexpr int kRows = 256;
  static constexpr int tile_columns(DType dtype) { return dtype == DType::e4m3 ? 128 : 256; }
  int64_t column_tiles() const { return (n + tile_columns(dtype) - 1) / tile_columns(dtype); }
  bool has_whole_shards() const { return m % (int64_t(ranks) * kRows) == 0; }
  int64_t shard_rows() const {
    const int64_t most = (m + ranks - 1) / ranks;
    return (most + kRows - 1) / kRows * kRows;
  }
  /// Of a shard in whole tiles.
  size_t slot_bytes() const {
    return size_t(shard_rows() * column_tiles() * tile_columns(dtype)) * size_of(result);
  }
  /// Tiles are stored, and signalled, in slices of these rows: of a shard, one column of tiles
  /// after the other.
  static constexpr int kSliceRows = 64;
  int64_t slices() const { return column_tiles() * (shard_rows() / kSliceRows); }
};

/// How a call's tiles get to their owners.
struct AddingPlan {
  int pieces = 0;  ///< of a shard, by the copy engine: the sooner the first leaves and the last
                   ///< arrives, the more copies; 0: by stores
  bool between = false;  ///< by stores: local tiles come between the remote ones, not after them
  int later = 0;         ///< by stores: one of so many tiles is sent under local ones; 0: none
};
/// All plans. The first is used where nothing is measured; the rest are in order of host cost.
constexpr AddingPlan kAddingPlans[] = {{0, false}, {0, false, 6}, {0, true}, {2}, {4}};

struct AddingJob {
  const void* x;         ///< [m, k]
  const void* weight;    ///< [n, k]
  void* out;             ///< [this rank's rows, n]
  ScalePointers scales;  ///< e4m3
  /// Shards by owner and by source, one column of tiles after the other: [ranks, column_tiles(),
  /// shard_rows(), tile_columns()], and one rank less. The outbox is this rank's local send buffer;
  /// where tiles are stored, it is only for those that are sent later, or whose owner's wait timed
  /// out. `received`: what the others sent.
  void* outbox;
  const void* received;
  PeerTable staging;  ///< signals are counted from `entered`, by rank; `arrived`, by source and
                      ///< then by kMostPieces; `landed`, by source and then by slice
  int entered, arrived, landed;
  CallCounter* calls;  ///< a reader is a block
  /// Where the copy engine sends, by step of the ring and then by kMostPieces: tiles counted, 0
  /// between calls; pieces that are ready, which become 1 and are set back by who sends them; and
  /// what their signal becomes, the call's epoch, or 0 when the wait for their owner timed out.
  unsigned *counted, *ready;
  uint64_t* sending;
  int plan;  ///< of plans()
  Watch watch;
  TileLog timeline{};          ///< for kernels that record
  const void* bias = nullptr;  ///< [n], or none; only kernels of any rows add one
};

/// Host-side launch state is kept and reused while the operands stay the same.
class AddingKernel {
 public:
  static constexpr int kMostPieces = 4;
  /// Values of K, on every rank: the first k-blocks, under which a tile is stored, add nothing.
  static constexpr int64_t kLeastK = 512;

  virtual ~AddingKernel() = default;
  /// Those of kAddingPlans that the shape has.
  virtual const std::vector<AddingPlan>& plans() const = 0;
  virtual RecordedTiles recorded_tiles() const = 0;
  /// Where the copy engine sends, the pushes must be enqueued next, on other streams: for every
  /// piece of every other shard, in the ring's order, a wait for its word of `ready`, which is set
  /// back, the copy to the owner's `received` and that of its `sending` to its signal. Throws
  /// DeviceError.
  virtual void launch(const AddingJob& job, cudaStream_t stream) = 0;
};

/// Throws DeviceError. `fp8`: e4m3.
std::unique_ptr<AddingKernel> make_adding_kernel(const AddingShape& shape);
std::unique_ptr<AddingKernel> make_adding_kernel_fp8(const AddingShape& shape);
/// The same for any M of at least a row a rank, with a bias if there is one. They have no plan by
/// pieces.
std::unique_ptr<AddingKernel> make_adding_kernel_any_rows(const AddingShape& shape);
std::unique_ptr<AddingKernel> make_adding_kernel_fp8_any_rows(const AddingShape& shape);

}  // namespace tandem::gpu
