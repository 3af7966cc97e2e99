// The ranks' part in saving and resuming: whole, unsharded tensors are gathered on rank 0 one by
// one, so any TP x DP can resume from what another left. All functions are collective, and over a
// whole world.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "model/transformer.h"
#include "train/checkpoint.h"
#include "train/data_parallel.h"

namespace tandem {

/// Gathers tensors over the ranks that have the whole model between them, on the first of them.
class TensorGather {
 public:
  /// `ranks`: TP ranks, or EP x TP ranks whose TP index, of `tp`, runs fastest: then tensors that
  /// are no expert's come from the first EP rank.
  TensorGather(Communicator& ranks, int tp, std::span<const Parameter> list);
  size_t size() const { return list_.size(); }
  const Parameter& parameter(size_t i) const { return list_[i]; }
  /// `flat`: this rank's array, laid out like the parameters. Returns the whole tensor i on rank 0,
  /// valid until the next call, and nothing elsewhere.
  std::span<const float> gather(size_t i, std::span<const float> flat);

 private:
  struct Range {
    int64_t begin, count;
  };
  Communicator& ranks_;
  std::span<const Parameter> list_;
  std::vector<std::vector<Range>> ranges_;  // by rank, by parameter
  std::vector<float> part_, whole_;
};

struct TrainedRanks {
  Communicator& world;
  std::string layout;  ///< what must be the same for residuals to be of use
  Communicator& tp;
  Communicator& dp;
  Transformer& model;
  DataParallel& optimizer;
  // With experts: the EP x TP ranks that share them, those that hold the same ones, and the
  // optimizer of the experts' part. Else nullptr.
  Communicator* experts = nullptr;
  Communicator* expert_dp = nullptr;
  DataParallel* expert_optimizer = nullptr;

  Communicator& gathering() const { return experts ? *experts : tp; }
  /// Holds the model, or a part of it, of the first replica.
  bool first_replica() const { return (expert_dp ? *expert_dp : dp).rank() == 0; }
  bool root() const { return first_replica() && gathering().rank() == 0; }
};

/// Returns once rank 0 has committed and pruned. `out` and `keeper` matter on rank 0 alone.
void save_checkpoint(const TrainedRanks& ranks, const std::string& out, const TrainState& state,
                     const ModelConfig& model, CheckpointKeeper* keeper);
/// OUT/final/{config.json, model.safetensors}.
void save_final(const TrainedRanks& ranks, const std::string& out, const ModelConfig& model);
/// Weights, moments and the residuals of error feedback of a verified checkpoint. Residuals are of
/// one rank of one layout: in a run of another they start at zero. Returns what there is to say of
/// them, or nothing.
std::string load_checkpoint(const TrainedRanks& ranks, const std::string& path);

}  // namespace tandem
