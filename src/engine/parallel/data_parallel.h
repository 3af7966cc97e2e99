// Data parallelism with the optimizer's state split over the ranks (ZeRO stage 1/2): each bucket's
// gradients leave for their owners as soon as backward has finished them, owners sum in rank order
// and update their shard, and updated parameters leave bucket by bucket.
//
// One step is: `ready` calls during the last microbatch's backward, `reduce`, `update`, in this
// order on every rank. Gradients are zeroed by `update`. No barrier is needed between steps: a rank
// sends a bucket's gradients of step s + 1 only after it has received everyone's parameters of step
// s, which their owners sent after they had read its gradients of step s.
//
// Over a wire format (engine/parallel/shard_messages.h) gradients are encoded once, where they
// leave, and the owner adds its own as they are. With error feedback (arXiv 1901.09847) what
// encoding lost is added to the next step's. Weights over an exact wire arrive as they were sent.
// Over any other, what travels is the difference between the owner's f32 weights and those that all
// ranks hold (SDP4Bit, arXiv 2410.15526, section 3.1): all ranks, the owner too, add what it
// decodes as, and what was lost is in the next difference. Either way all ranks hold the same bits.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "engine/optim/adamw.h"
#include "engine/parallel/buckets.h"
#include "engine/parallel/shard_messages.h"
#include "tandem/communicator.h"

namespace tandem {

struct DataParallelWires {
  Wire gradients{}, weights{};
  bool error_feedback = true;  ///< of gradients
};

class DataParallel {
 public:
  /// Collective over `dp`. The spans must outlive this.
  DataParallel(Communicator& dp, std::span<float> parameters, std::span<float> gradients,
               std::span<const Parameter> list, int64_t bucket_elements,
               const DataParallelWires& wires = {});

  /// After the parameters have been set: the owners' weights are these.
  void adopt_parameters();

  /// gradients() from `begin` to the end are final.
  void ready(int64_t begin);

  struct Squares {
    double sharded = 0, replicated = 0;  ///< of the TP-sharded and the TP-replicated parameters
  };
  /// Ends the reduction. Returns the sum of squares over this rank's shards.
  Squares reduce();
  /// AdamW on this rank's shards, then everyone's into the parameters.
  void update(const AdamStep& step);

  /// The weights as all ranks hold them, both moments, and the weights as their owners hold them.
  enum class Moment : uint8_t { weights, first, second, master };
  struct Part {
    int64_t begin = 0;  ///< in the flat array
    std::span<float> values;
  };
  /// What this rank owns, without padding: all ranks together have each element once (of `master`
  /// only where has_masters()). Written to, it is what the next step goes on from.
  std::vector<Part> parts(Moment moment);
  /// Whether owners have weights of their own: those of all ranks are what has arrived of them.
  bool has_masters() const { return !master_.empty(); }
  /// What this rank's next gradients are to be corrected by, laid out like the gradients; empty
  /// without error feedback. `update` changes it: a step that is dropped before leaves it as it
  /// was.
  std::span<float> residual() { return residual_; }

  struct Sent {
    uint64_t gradients = 0, weights = 0;
    uint64_t plain = 0;  ///< what the gradients would have been without a wire
    Sent& operator+=(const Sent& other) {
      gradients += other.gradients, weights += other.weights, plain += other.plain;
      return *this;
    }
  };
  /// Bytes that this rank has sent since the last call.
  Sent take_sent() { return std::exchange(sent_bytes_, {}); }

 private:
  struct OwnedRun {
    ParameterRun run;  // in the flat array
    int64_t slot;      // of its first element in m_ and v_
    int bucket;
  };
  /// Of `rank`'s message of `bucket`.
  size_t slot_of(const ShardMessages& messages, int rank, int bucket) const {
    return (size_t(rank) * size_t(buckets_.count()) + size_t(bucket)) * messages.most_bytes();
  }
  int signal(int rank, int bucket) const { return rank * buckets_.count() + bucket; }
  void send_gradients(int bucket);
  const float* gradients_of(int rank, int bucket);
  void sum_bucket(int bucket);
  void step_bucket(int bucket, size_t& next, const AdamStep& step);
  void send_weights(int bucket);
  void receive_weights(int owner, int bucket);
  void make_differences(int bucket);
  void add_differences(int owner, int bucket);
  void wait(SymmetricBuffer& buffer, int rank, int bucket, const char* op);
  float* values_of(const OwnedRun& owned, Moment moment);

  Communicator& dp_;
  std::span<float> parameters_, gradients_;
  Buckets buckets_;
  std::vector<OwnedRun> owned_;  // by bucket
  std::vector<float> m_, v_;     // own shards side by side
  const ShardMessages gradient_messages_, weight_messages_;
  std::vector<float> residual_;       // of the whole array
  std::vector<float> next_residual_;  // what it will be once this step's update is made
  std::vector<float> master_;         // like m_
  std::vector<float> decoded_;        // a bucket's gradients by rank, or one shard's differences
  std::vector<std::byte> gradient_staging_, weight_staging_;  // what puts read until the flush
  std::shared_ptr<SymmetricBuffer> gradient_slots_, parameter_slots_;
  uint64_t epoch_ = 1;
  int sent_ = 0;  // buckets of this step
  Sent sent_bytes_;
};

}  // namespace tandem
