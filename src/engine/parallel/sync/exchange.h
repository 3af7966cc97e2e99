// Messages of learners about their shards of a fragment, and the mean change of these messages:
// the part in which methods of `sync` differ. OuterSync (engine/parallel/sync/outer_sync.h) decides
// when, sends, and applies.
//
// Decoding is a pure function of the messages and combines them in the order of the learners, in
// f32, so that all learners have the same bits. Tensors and messages are on the device of an Exec;
// on a GPU the work is enqueued on its stream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/exec.h"
#include "engine/parallel/sync/config.h"
#include "tandem/tensor.h"

namespace tandem {

/// Elements [begin, begin + count) of a shard, of one parameter.
struct SyncSlice {
  size_t parameter = 0;  ///< index in the model's list
  int64_t begin = 0, count = 0;
  int64_t rows = 1, columns = 0;  ///< of the whole parameter; a vector is one row
  int64_t local_columns = 0;      ///< that this rank has of each row
  /// Sharded over tensor-parallel ranks. All others hold the same values of it and begin elsewhere:
  /// what they send of the rest (norms, routers) must decode to the same values at any place.
  bool sharded = true;
};

/// This rank's elements of a fragment, in the same order on the ranks of all learners that hold
/// them. Adjacent slices have no gap.
struct SyncShard {
  std::vector<SyncSlice> slices;
  int64_t elements() const {
    return slices.empty() ? 0 : slices.back().begin + slices.back().count;
  }
  /// Adds a slice after all others.
  void add(SyncSlice slice) {
    slice.begin = elements();
    slices.push_back(slice);
  }
};

class Exchange {
 public:
  virtual ~Exchange() = default;
  /// Bytes of memory in which `encode` and `combine` compute, for the shard.
  virtual size_t scratch_bytes(const SyncShard& /*shard*/) const { return 0; }
  /// Allocates them, unless those of another shard are as many. Called before `encode`.
  virtual void prepare(const SyncShard& /*shard*/) {}
  /// Bytes allocated so far.
  virtual size_t bytes() const { return 0; }
  /// Bytes of the largest message of the shard.
  virtual size_t max_bytes(const SyncShard& shard) const = 0;
  /// Encodes the shard's changes, the anchor minus the learner's weights or with method demo the
  /// gradients times the learning rate, f32 [elements]. Returns the bytes used. `message`: of
  /// max_bytes, at a multiple of 16 bytes. `unsent`: f32
  /// [elements], what messages have left out so far, which is updated; without data unless the
  /// messages are sparse.
  virtual size_t encode(const SyncShard& shard, const Tensor& changes, const Tensor& unsent,
                        std::byte* message) = 0;
  /// Sets `mean`, f32 [elements], to the learners' mean change. `messages`: of max_bytes, a learner
  /// each, whose bytes past those used are arbitrary. Of one message: what it holds. With method
  /// demo the signs of the mean.
  virtual void combine(const SyncShard& shard, std::span<const std::byte* const> messages,
                       const Tensor& mean) const = 0;
};

/// The method's. Throws InvalidArgument for a wire format that does not support f32.
std::unique_ptr<Exchange> make_exchange(const SyncConfig& config, const Exec& exec = {});

}  // namespace tandem
