// All-gather of updated weights over data-parallel ranks, bucket by bucket in the order of use: an
// owner updates its shard and sends it, and `await` receives what is needed next.
//
// Weights that ranks hold only in the dtype of GEMMs are sent in it: half the bytes of f32 for
// bf16. An exact wire format reproduces weights bitwise. With any other, ranks send the difference
// between the owner's f32 weights and the weights that all ranks hold (SDP4Bit, arXiv 2410.15526,
// section 3.1): all ranks, including the owner, add the decoded difference, and the next one
// corrects its error. Either way all ranks hold the same bits.
//
// On GPUs `begin` enqueues all of it on dp's stream, where it runs concurrently with the next
// forward pass, and `await` orders the forward pass after what it needs.
#pragma once

#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "engine/parallel/message_ring.h"
#include "engine/parallel/sharded/shard_messages.h"
#include "engine/parallel/sharded/sharded_state.h"

namespace tandem {

class WeightSync {
 public:
  struct Options {
    Wire wire{};
    /// GPUs: the forward pass waits only for the weights that it uses next.
    bool overlap = true;
    /// Buckets are sent in the order in which gradients are reduced, not in that of use.
    bool in_reduction_order = false;
  };
  /// `weights`: as of `state`, read by work of `forward`. Throws Unsupported for a wire format on
  /// GPUs or of weights that are not in f32. Collective over `dp`.
  WeightSync(const Exec& forward, Communicator& dp, const WeightViews& weights,
             const Buckets& buckets, std::span<const Parameter> list, const Options& options,
             const ShardedState& state);

  /// Whether ranks send differences, so that owners need masters.
  static bool sends_differences(int ranks, const Wire& wire) {
    return ranks > 1 && !wire.is_exact();
  }

  /// Begins a step: `update(bucket)` is called for every bucket, in the order of use, before this
  /// rank's shard of it is sent; it writes the working copy, too, unless ranks send differences.
  /// `gathered(bucket)` is called when all shards of a bucket are here. CPU ranks send from the
  /// next `progress` or `await` on, ahead as many buckets as fit into the ring, but only those
  /// whose update would not wait for other ranks, as `is_ready(bucket)` says.
  void begin(std::function<void(int bucket)> update, std::function<void(int bucket)> gathered = {},
             std::function<bool(int bucket)> is_ready = {});
  /// Blocks until the range's weights are those of all owners. Waits form no cycle if all ranks
  /// await the same ranges in the same order.
  void await(FlatRange range);
  /// CPU ranks: whether `await` would not wait.
  bool has(FlatRange range) const;
  /// CPU ranks: sends and receives what is possible without waiting.
  void progress();
  /// Returns once this rank's shards are updated. With differences or `gathered`, and on GPUs, as
  /// `await` of all weights; else the other ranks' weights are still to be awaited.
  void await_local();
  /// CPU ranks: whether all weights of the step have been awaited; GPUs: whether waits for them are
  /// enqueued.
  bool is_complete() const {
    return (begins_all_ ? received_ - 1 : awaited_) + 1 == buckets_.count();
  }

  size_t bytes() const { return ring_.bytes() + decoded_.size() * sizeof(float); }
  uint64_t take_sent() { return std::exchange(sent_bytes_, 0); }

 private:
  /// Bucket 0 is at the end of the array, which is used last and reduced first.
  int bucket_at(int index) const {
    return in_reduction_order_ ? index : buckets_.count() - 1 - index;
  }
  int last_index(FlatRange range) const;
  bool can_update(int index) const;
  void update(int index);
  void send(int index);
  void receive_next();
  void receive(int index);
  void receive(int owner, int index);
  /// Contiguous memory of a shard, and where it is in the message.
  struct Slice {
    Tensor values;
    size_t offset;
  };
  std::vector<std::vector<Slice>> make_slices() const;
  const std::vector<Slice>& slices(int bucket, int owner) const {
    return slices_[size_t(bucket * dp_.size() + owner)];
  }
  size_t message_bytes() const;
  void send_message(int index, const std::byte* message, size_t bytes);
  void receive_encoded(int owner, int bucket, const std::byte* message);
  void refresh(FlatRange range);
  void make_differences(int bucket);
  void add_differences(int owner, int bucket);

  Exec forward_, exec_;
  Communicator& dp_;
  bool overlap_, in_reduction_order_;
  WeightViews weights_;
  Buckets buckets_;
  std::vector<ParameterRun> runs_;
  ShardMessages messages_;
  const ShardedState& state_;
  std::vector<std::vector<Slice>> slices_;  // by bucket and owner
  MessageRing ring_;
  std::vector<float> decoded_;  // one shard's differences
  std::function<void(int bucket)> update_, gathered_;
  std::function<bool(int bucket)> is_ready_;
  std::vector<Fence> updated_;  // by bucket of the step
  bool begins_all_;             // `begin` sends and receives all: enqueued, or of one rank
  int awaited_;                 // last bucket that the forward pass waits for
  int updated_shards_;          // of this step's buckets, in the order of use
  int sent_, received_;         // buckets of this step, in the order of use
  uint64_t sent_bytes_ = 0;
};

}  // namespace tandem
