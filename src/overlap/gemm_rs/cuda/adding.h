// GEMM+RS as one persistent product whose tiles are moved beside it (Hopper, bf16 and f16). The
// others' tiles come first, into this rank's outbox. From there either the copy engine takes them,
// a piece of a shard at a time: when one is complete, a word in memory says so, for which the
// stream that pushes it waits; or blocks that have no part in the product do, 64 rows of a tile at
// a time. The own tiles come last, and the parts that the others sent are more steps of their loop
// along K, through the pipeline that brings x and the weight: nothing is summed behind the product.
//
// The copy engine fills the wire and costs no multiprocessor, but some 5 us for each piece beside
// its bytes, 15 until the first has arrived, and the host a graph. Blocks cost nothing of that, but
// move 30 GB/s each beside a product, and not above 300 all together: a few are for when the wire
// has time to spare, many for when the product has.
//
// The sum is in f32, in an order that is fixed: source by source, in the order in which their parts
// arrive (schedule/ring.h), each behind a share of the product, the last one behind all of it
// (schedule/adding_order.h); then, where a tile is split along K (schedule/wave_split.h; bf16), its
// end, in two terms of 8 bits each. The product goes backwards along K in every other tile of a
// cluster.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <vector>

#include "comm/nccl/device_signal.h"
#include "tandem/dtype.h"

namespace tandem::gpu {

/// What all calls of a rank's operator have in common; K is this rank's.
struct AddingShape {
  int64_t m, n, k;
  int rank, ranks;
};

/// How a call's tiles get to their owners.
struct AddingPlan {
  int senders = 0;  ///< blocks that send, in clusters of two; none: the copy engine does
  int pieces =
      1;  ///< of a shard; the sooner the first leaves and the last arrives, the more copies
};
/// All that there are: the one where nothing is measured, then those that cost the host less first.
constexpr AddingPlan kAddingPlans[] = {{0, 1}, {4, 1}, {16, 1}, {0, 2}, {0, 4}};

struct AddingJob {
  const void* x;       ///< [m, k]
  const void* weight;  ///< [n, k]
  void* out;           ///< [m / ranks, n]
  /// Shards by owner and by source, one column of tiles after the other: [ranks, column_tiles(n),
  /// m / ranks, kColumns], and one rank less.
  void* outbox;
  const void* parts;
  PeerTable staging;  ///< signals are counted from `entered`, by rank; `arrived`, by source and
                      ///< then by kMostPieces; `landed`, by source and then by slice
  int entered, arrived, landed;
  uint64_t* epoch;  ///< of the last call, on the device; the kernel advances it
  unsigned* done;   ///< 0 between calls
  /// Where the copy engine sends, by step of the ring and then by kMostPieces: tiles counted, 0
  /// between calls; pieces that are ready, which become 1 and are set back by who sends them; and
  /// what their signal becomes, the call's epoch, or 0 when their owner was waited for in vain.
  unsigned *counted, *ready;
  uint64_t* sending;
  int plan;  ///< of plans()
  Watch watch;
};

/// Host-side launch state is kept and reused while the operands stay the same.
class AddingKernel {
 public:
  static constexpr int kMostPieces = 4;
  /// A shard must be a multiple of these rows; its columns are filled up to whole tiles.
  static constexpr int kRows = 256, kColumns = 256;
  static constexpr int64_t column_tiles(int64_t n) { return (n + kColumns - 1) / kColumns; }
  /// Senders carry a tile in slices of these rows, which are contiguous: of a shard, one column of
  /// tiles after the other.
  static constexpr int kSliceRows = 64;
  static constexpr int64_t slices(int64_t shard_rows, int64_t n) {
    return column_tiles(n) * (shard_rows / kSliceRows);
  }
  /// Values of K, on every rank: parts are added behind some of the product.
  static constexpr int64_t kLeastK = 512;

  virtual ~AddingKernel() = default;
  /// Those of kAddingPlans that the shape has.
  virtual const std::vector<AddingPlan>& plans() const = 0;
  /// Where there are no senders, the pushes must be enqueued next, on other streams: for every
  /// piece of every other shard, in the ring's order, a wait for its word of `ready`, which is set
  /// back, the copy to the owner's `parts` and that of its `sending` to its signal. Throws
  /// DeviceError.
  virtual void launch(const AddingJob& job, cudaStream_t stream) = 0;
};

/// Throws DeviceError.
std::unique_ptr<AddingKernel> make_adding_kernel(DType dtype, const AddingShape& shape);

}  // namespace tandem::gpu
