// Partition into chunks of a tensor that is split over the ranks by shard_of, and the two
// operations on a received chunk. All in bytes.
#pragma once

#include "collectives/call.h"

namespace tandem::collectives {

struct Span {
  size_t begin, bytes;
};

class Chunks {
 public:
  /// `units` of `unit_bytes` each, in total over all ranks of `call`.
  Chunks(const Call& call, int64_t units, size_t unit_bytes)
      : units_(units), unit_bytes_(unit_bytes), world_(call.size()) {
    const size_t largest = size_t(shard_of(units, world_, 0).count) * unit_bytes;
    chunk_ = int64_t(call.chunk_bytes(largest));
    steps_ = slices_in(int64_t(largest), chunk_);
  }
  /// Number of steps in which some rank's shard has a chunk.
  int64_t steps() const { return steps_; }
  /// Chunk `step` of `rank`'s shard, as a range of the whole tensor; empty before step 0 and past
  /// the shard's end. A chunk may end inside a unit but never inside an element.
  Span at(int rank, int64_t step) const {
    if (step < 0) return {0, 0};
    const Shard shard = shard_of(units_, world_, rank);
    const Slice slice = slice_of(shard.count * int64_t(unit_bytes_), chunk_, step);
    return {size_t(shard.begin) * unit_bytes_ + size_t(slice.begin), size_t(slice.count)};
  }

 private:
  int64_t units_;
  size_t unit_bytes_;
  int world_;
  int64_t chunk_, steps_;
};

/// Copies the next chunk from `source` to `to`.
void receive_into(Call& call, Stream stream, int source, std::byte* to, size_t bytes);

/// out = reduction of `local` and every other rank's next chunk of the reduce stream, in rank
/// order.
void receive_and_reduce(Call& call, DType dtype, ReduceOp op, const std::byte* local,
                        std::byte* out, size_t bytes);

}  // namespace tandem::collectives
