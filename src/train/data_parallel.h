// Data parallelism with the optimizer's state split over the ranks (ZeRO stage 1/2): each bucket's
// gradients leave for their owners as soon as backward has finished them, owners sum in rank order
// and update their shard, and updated parameters leave bucket by bucket.
//
// One step is: `ready` calls during the last microbatch's backward, `reduce`, `update`, in this
// order on every rank. Gradients are zeroed by `update`. No barrier is needed between steps: a rank
// sends a bucket's gradients of step s + 1 only after it has received everyone's parameters of step
// s, which their owners sent after they had read its gradients of step s.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "tandem/communicator.h"
#include "train/adamw.h"
#include "train/buckets.h"

namespace tandem {

class DataParallel {
 public:
  /// Collective over `dp`. The spans must outlive this.
  DataParallel(Communicator& dp, std::span<float> parameters, std::span<float> gradients,
               std::span<const Parameter> list, int64_t bucket_elements);

  /// gradients() from `begin` to the end are final.
  void ready(int64_t begin);

  struct Squares {
    double sharded = 0, replicated = 0;  ///< of the TP-sharded and the TP-replicated parameters
  };
  /// Ends the reduction. Returns the sum of squares over this rank's shards.
  Squares reduce();
  /// AdamW on this rank's shards, then everyone's into the parameters.
  void update(const AdamStep& step);

  /// First and second moments as one array like the parameters: all of it on rank 0, nothing
  /// elsewhere. Collective over dp.
  enum class Moment : uint8_t { first, second };
  std::vector<float> collect(Moment moment);
  /// Takes this rank's shards out of a whole array.
  void restore(Moment moment, std::span<const float> whole);

 private:
  struct OwnedRun {
    ParameterRun run;  // in the flat array
    int64_t slot;      // of its first element in m_ and v_
    int bucket;
  };
  size_t slot_bytes_of(int rank, int bucket) const;
  int signal(int rank, int bucket) const { return rank * buckets_.count() + bucket; }
  void send_gradients(int bucket);
  void sum_bucket(int bucket);
  void wait(SymmetricBuffer& buffer, int rank, int bucket, const char* op);
  std::vector<float>& moment(Moment which) { return which == Moment::first ? m_ : v_; }

  Communicator& dp_;
  std::span<float> parameters_, gradients_;
  Buckets buckets_;
  std::vector<OwnedRun> owned_;  // by bucket
  std::vector<float> m_, v_;     // own shards side by side
  std::shared_ptr<SymmetricBuffer> gradient_slots_, parameter_slots_;
  uint64_t epoch_ = 1;
  int sent_ = 0;  // buckets of this step
};

}  // namespace tandem
