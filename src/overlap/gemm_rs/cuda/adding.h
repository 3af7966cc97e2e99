// GEMM+RS as one persistent product whose tiles the copy engine moves (Hopper, bf16 and f16). The
// others' tiles come first, into this rank's outbox; when a piece of a shard is complete, a word in
// memory says so, for which the stream that pushes it waits. The own tiles come last, and the parts
// that the others sent are more steps of their loop along K, through the pipeline that brings x and
// the weight: nothing is summed behind the product, and no multiprocessor sends.
//
// The sum is in f32, in an order that is fixed: source by source, in the order in which their parts
// arrive (schedule/ring.h), each behind a share of the product (schedule/adding_order.h), which
// goes backwards along K in every other tile of a cluster; last, where a tile is split along K
// (schedule/wave_split.h; bf16), its end, in two terms of 8 bits each.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "comm/nccl/device_signal.h"
#include "tandem/dtype.h"

namespace tandem::gpu {

/// What all calls of a rank's operator have in common; K is this rank's.
struct AddingShape {
  int64_t m, n, k;
  int rank, ranks;
};

struct AddingJob {
  const void* x;       ///< [m, k]
  const void* weight;  ///< [n, k]
  void* out;           ///< [m / ranks, n]
  /// Shards of pieces of columns, whole tiles of them, by owner and by source. A piece is
  /// contiguous: [ranks, pieces, m / ranks, column_tiles(n) * kColumns / pieces], and one rank
  /// less.
  void* outbox;
  const void* parts;
  PeerTable staging;  ///< signals are counted from `entered`, by rank, and `arrived`, by source and
                      ///< then by kMostPieces
  int entered, arrived;
  uint64_t* epoch;    ///< of the last call, on the device; the kernel advances it
  uint64_t* sending;  ///< the epoch of what is sent, once a piece is ready
  unsigned* done;     ///< 0 between calls
  /// By step of the ring and then by kMostPieces: tiles counted, 0 between calls, and pieces that
  /// are ready, which become 1 and are set back by who sends them.
  unsigned *counted, *ready;
  int pieces;  ///< of a shard, one of kPieces
  Watch watch;
};

/// Host-side launch state is kept and reused while the operands stay the same.
class AddingKernel {
 public:
  /// Into how many pieces a shard may be cut, where its columns of tiles can be: the sooner the
  /// first of them leaves and the sooner the last arrives, the more copies there are.
  static constexpr int kPieces[] = {1, 2, 4}, kMostPieces = 4;
  /// A shard must be a multiple of these rows; its columns are filled up to whole tiles.
  static constexpr int kRows = 256, kColumns = 256;
  static constexpr int64_t column_tiles(int64_t n) { return (n + kColumns - 1) / kColumns; }
  /// Values of K, on every rank: parts are added behind some of the product.
  static constexpr int64_t kLeastK = 512;

  virtual ~AddingKernel() = default;
  /// The pushes must be enqueued next, on another stream: for every piece of every other shard, in
  /// the ring's order, a wait for its word of `ready`, which is set back, the copy to the owner's
  /// `parts` and that of `sending` to its signal. Throws DeviceError.
  virtual void launch(const AddingJob& job, cudaStream_t stream) = 0;
};

/// Throws DeviceError.
std::unique_ptr<AddingKernel> make_adding_kernel(DType dtype, const AddingShape& shape);

}  // namespace tandem::gpu
