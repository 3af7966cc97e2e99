// Data parallelism with sharded optimizer state (ZeRO stage 1/2): each bucket's gradients are sent
// to their owners as soon as backward has finished them; owners sum in rank order, update their
// shard and send the updated parameters bucket by bucket.
//
// One step is: `ready` calls during the last microbatch's backward, `reduce`, `update`, in this
// order on every rank. `update` zeroes the gradients.
//
// Messages go through rings of up to `kWindow` buckets, so their memory does not grow with the
// model. Owners acknowledge every bucket they have read; a sender is at most a ring ahead. `ready`
// never waits: a bucket that its owners have no room for is sent later, from the gradients.
// `reduce` and `update` process buckets in the same order on all ranks, and before waiting for
// bucket b a rank has sent everything up to b, so waits cannot form a cycle.
//
// With a wire format (engine/parallel/shard_messages.h) gradients are encoded once, by the sender,
// and the owner adds its local ones unencoded. With error feedback (arXiv 1901.09847) the encoding
// error is added to the next step's gradients. An exact format reproduces weights bitwise. With any
// other, ranks send the difference between the owner's f32 weights and the weights that all ranks
// hold (SDP4Bit, arXiv 2410.15526, section 3.1): all ranks, including the owner, add the decoded
// difference, and its error is part of the next difference. Either way all ranks hold the same
// bits.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/optim/adamw.h"
#include "engine/parallel/buckets.h"
#include "engine/parallel/shard_messages.h"
#include "schedule/ring.h"
#include "tandem/communicator.h"

namespace tandem {

struct DataParallelWires {
  Wire gradients{}, weights{};
  bool error_feedback = true;  ///< for gradients
};

class DataParallel {
 public:
  static constexpr int kWindow = 4;  ///< buckets of a ring of messages, at most

  /// Collective over `dp`. The spans must outlive this object.
  DataParallel(Communicator& dp, std::span<float> parameters, std::span<float> gradients,
               std::span<const Parameter> list, int64_t bucket_elements,
               const DataParallelWires& wires = {});

  /// Copies parameters to the owners' master weights; call after setting the parameters.
  void adopt_parameters();

  /// Reports that gradients() from `begin` to the end are final.
  void ready(int64_t begin);

  struct Squares {
    double sharded = 0, replicated = 0;  ///< TP-sharded and TP-replicated parameters
  };
  /// Completes the reduction. Returns the sum of squares over this rank's shards.
  Squares reduce();
  /// Runs AdamW on this rank's shards and all-gathers the updated parameters.
  void update(const AdamStep& step);

  /// Weights as held by all ranks, both moments, and the owners' master weights.
  enum class Moment : uint8_t { weights, first, second, master };
  struct Part {
    int64_t begin = 0;  ///< in the flat array
    std::span<float> values;
  };
  /// State owned by this rank, without padding: all ranks together cover each element once
  /// (`master` only if has_masters()). Writable: the next step continues from it.
  std::vector<Part> parts(Moment moment);
  /// Whether owners have separate master weights: the weights of all ranks are then sums of decoded
  /// differences.
  bool has_masters() const { return !master_.empty(); }
  /// Error feedback residual of this rank's next gradients, in the gradients' layout; empty without
  /// error feedback. Changed only by `update`: a step dropped before it leaves the residual
  /// unchanged.
  std::span<float> residual() { return residual_; }

  struct Sent {
    uint64_t gradients = 0, weights = 0;
    uint64_t plain = 0;  ///< gradient bytes if uncompressed
    Sent& operator+=(const Sent& other) {
      gradients += other.gradients, weights += other.weights, plain += other.plain;
      return *this;
    }
  };
  /// Bytes of this rank's optimizer state, messages and residuals: all but the given spans.
  size_t state_bytes() const;
  size_t parameters() const { return parameters_.size(); }

  /// Bytes sent by this rank since the last call.
  Sent take_sent() { return std::exchange(sent_bytes_, {}); }

 private:
  struct OwnedRun {
    ParameterRun run;  // in the flat array
    int64_t slot;      // offset of its first element in m_ and v_
    int bucket;
  };
  /// Ring of messages from and to every rank. Message n is in slot n % window; numbers continue
  /// from step to step.
  struct Ring {
    const char* op;            ///< in errors and spans
    int window = 1;            ///< slots, one bucket each
    size_t message_bytes = 0;  ///< of a slot
    uint64_t begin = 0;        ///< number of the step's first message
    std::shared_ptr<SymmetricBuffer> slots = {};
    std::vector<std::byte> staging = {};  ///< encoded messages, read by puts until acknowledged

    int slot(int bucket) const { return int((begin + uint64_t(bucket)) % uint64_t(window)); }
    size_t offset(int rank, int bucket) const {
      return size_t(rank * window + slot(bucket)) * message_bytes;
    }
    int arrival(int rank, int bucket) const { return rank * window + slot(bucket); }
    uint64_t epoch(int bucket) const { return begin + uint64_t(bucket) + 1; }
  };
  int acknowledgement(const Ring& ring, int rank) const { return dp_.size() * ring.window + rank; }
  void make_ring(Ring& ring, const ShardMessages& messages, int staged_ranks);
  /// Whether all peers have read the bucket whose slot `bucket` is to be written to.
  bool has_room(const Ring& ring, int bucket) const;
  void wait_for_room(const Ring& ring, int bucket);
  bool has_arrived(const Ring& ring, int bucket) const;
  void wait_for_arrival(const Ring& ring, int rank, int bucket);
  void acknowledge(const Ring& ring, int rank, int bucket);
  int peer(int hop) const { return schedule::ag_source(dp_.rank(), dp_.size(), hop); }
  int previous(int hop) const { return schedule::ag_target(dp_.rank(), dp_.size(), hop); }

  void send_gradients(int bucket);
  const float* gradients_of(int rank, int bucket);
  void sum_bucket(int bucket);
  void finish_bucket();
  void step_bucket(int bucket, size_t& next, const AdamStep& step);
  void send_weights(int bucket);
  void receive_weights(int owner, int bucket);
  void receive_bucket(int bucket);
  void make_differences(int bucket);
  void add_differences(int owner, int bucket);
  float* values_of(const OwnedRun& owned, Moment moment);

  Communicator& dp_;
  std::span<float> parameters_, gradients_;
  Buckets buckets_;
  std::vector<OwnedRun> owned_;  // by bucket
  std::vector<float> m_, v_;     // local shards, contiguous
  const ShardMessages gradient_messages_, weight_messages_;
  std::vector<float> residual_;       // layout of the whole array
  std::vector<float> next_residual_;  // residual after this step's update
  std::vector<float> master_;         // layout of m_
  std::vector<float> decoded_;        // a bucket's gradients by rank, or one shard's differences
  Ring gradient_ring_{"dp_reduce_scatter"}, weight_ring_{"dp_all_gather"};
  // In this step: buckets whose gradients are final, were sent, and were summed; runs whose squares
  // were added.
  int final_ = 0, sent_ = 0, summed_ = 0;
  size_t squared_runs_ = 0;
  Squares squares_;
  Sent sent_bytes_;
};

/// Bytes a parameter of this rank's state, weights and gradients included, in words. `experts`:
/// null if there are none.
std::string describe_state(const DataParallel& dense, const DataParallel* experts);

}  // namespace tandem
