// Reduce-scatter of gradients over data-parallel ranks: each bucket is sent to its owners as soon
// as backward has finished it, and owners sum in rank order.
//
// `ready` never waits: a bucket that its owners have no room for is sent later, from the gradients.
// `finish` processes buckets in the same order on all ranks, and before waiting for bucket b a rank
// has sent everything up to b, so waits cannot form a cycle. On GPUs all of this is enqueued on
// dp's stream, concurrently with the backward pass on its own.
//
// With a gradient window (ZeRO-2) the gradients of every backward pass are reduced, and owners add
// them to those of the passes before. A bucket is copied when it is sent, so its memory in the
// window is free then; `make_room` waits for that. It waits only for what ranks do in it and in
// `finish`, which all call at the same points of a pass, so these waits cannot form a cycle,
// either.
//
// The same holds where ranks run several logical replicas in turn: each round of replicas, one a
// rank, is a pass, and owners sum in the order of the replicas. A rank without one in a round calls
// `skip_pass` and sends empty messages.
//
// Gradients in bf16 are sent in it; owners sum in f32, and round once.
//
// With a wire format (engine/parallel/sharded/shard_messages.h) gradients are encoded once, by the
// sender, and the owner adds its local ones uncompressed. With error feedback (arXiv 1901.09847)
// the encoding error is added to the next step's gradients.
#pragma once

#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "core/host_copy.h"
#include "engine/model/gradient_memory.h"
#include "engine/parallel/message_ring.h"
#include "engine/parallel/sharded/buckets.h"
#include "engine/parallel/sharded/shard_messages.h"
#include "tandem/tensor.h"

namespace tandem {

class GradientSync {
 public:
  struct Options {
    Wire wire{};
    bool error_feedback = true;
    /// GPUs: buckets are sent during the backward pass, not at its end, and waits are enqueued.
    bool overlap = true;
    /// Gradients are a window, or of several logical replicas.
    bool is_window = false;
  };
  /// `gradients`: from element `begin`, which must outlive this object, written by work of
  /// `backward`. `reduced(bucket)` is called in bucket order as soon as this rank's shard is
  /// summed, on a GPU by work enqueued on dp's stream. Throws Unsupported for a wire format on
  /// GPUs, and for a wire format or a window of gradients that are not in f32. Collective over
  /// `dp`.
  GradientSync(const Exec& backward, Communicator& dp, const GradientMemory& gradients,
               int64_t begin, const Buckets& buckets, std::span<const Parameter> list,
               const Options& options, std::function<void(int bucket)> reduced);

  /// Reports that these gradients are final. Each element is reported at most once a step, with a
  /// window once a pass, in any order.
  void ready(FlatRange range);
  /// CPU ranks: sends and sums what is possible without waiting. GPUs: enqueues what is final.
  void progress();
  /// Window: must be called before gradients of a pass are written for the first time. Returns once
  /// those before are sent: of the pass before, and of this one from `sent_from` on.
  void make_room(int64_t sent_from);
  /// Window: instead of a pass of a logical replica that there is not, after those before.
  void skip_pass();
  /// Completes the reduction of the step, on a GPU when dp's stream reaches this point; gradients
  /// that were not reported are final now.
  void finish();
  /// Makes the residuals of this step's messages those of the next step. A step dropped before
  /// leaves them unchanged.
  void keep_residuals() { residual_.swap(next_residual_); }

  /// Summed gradients of a range in one shard of this rank, [count] in their dtype, between
  /// `finish` and the next pass.
  Tensor reduced(FlatRange range) const;

  /// Error feedback residual of this rank's next gradients, f32 on the host, in the gradients'
  /// layout; empty without error feedback.
  Tensor residual() { return host_tensor(residual_); }
  /// Bytes of messages, of gradients in flight and of residuals; of the sums that owners keep.
  size_t bytes() const;
  size_t sum_bytes() const { return sums_.bytes(); }

  struct Sent {
    uint64_t bytes = 0, uncompressed = 0;
  };
  Sent take_sent() { return std::exchange(sent_bytes_, {}); }

 private:
  Tensor local(FlatRange range) const { return gradients_.at(begin_ + range.begin, range.count); }
  Tensor copied(int bucket) const;
  void copy_bucket(int bucket);
  void advance();
  void send(int bucket);
  Tensor rank_gradients(int rank, int bucket);
  void sum_shard(int bucket);
  void finish_bucket();
  void send_until(int buckets);
  void finish_pass();
  void end_pass();
  void finish_loading();
  bool has_replica(int rank) const;

  Exec backward_, exec_;
  Communicator& dp_;
  bool overlap_, is_window_, encodes_;
  Fence finished_;  // point of the backward pass
  Fence copied_;    // window: point of dp's stream
  const GradientMemory& gradients_;
  int64_t begin_;
  Buckets buckets_;
  ShardMessages messages_;
  std::function<void(int bucket)> reduced_;
  MessageRing ring_;
  bool is_loading_;       // GPUs: in the passes of the first step, which load kernels
  Memory copies_, sums_;  // window: this rank's shards, of buckets in flight and of all
  int passes_ = 0;        // window: summed in this step
  std::vector<float> residual_, next_residual_;
  std::vector<float> decoded_;       // a bucket's gradients by rank
  std::vector<int64_t> unreported_;  // elements by bucket
  // In this step: buckets whose gradients are final, were sent, and were summed.
  int final_ = 0, sent_ = 0, summed_ = 0;
  Sent sent_bytes_;
};

}  // namespace tandem
