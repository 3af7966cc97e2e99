// Collective saving and resuming: every rank writes and reads its shard of the full tensors on disk
// (engine/checkpoint/shared_tensors.h), so any TP x DP x PP can resume from a checkpoint of any
// other.
// All functions are collective over the whole world.
#pragma once

#include <string>
#include <vector>

#include "engine/checkpoint/checkpoint.h"
#include "engine/model/stage.h"
#include "engine/parallel/sharded_optimizer.h"

namespace tandem {

/// A pipeline stage, or the whole model, and its optimizer.
struct TrainedStage {
  Stage& model;
  ShardedOptimizer& optimizer;
};

struct TrainedRanks {
  Communicator& world;
  std::string layout;  ///< residuals are reused only if it is the same
  Communicator& tp;
  std::vector<TrainedStage> stages;  ///< of this rank
  /// Approximate size of a checkpoint.
  uint64_t bytes() const;
  /// All parameters of the model; which are on this rank and where differs between its stages.
  const std::vector<Parameter>& parameter_list() const;
  bool has_masters() const;
};

/// Saves a checkpoint; returns once rank 0 has committed and pruned. An error on any rank is thrown
/// on all, including a non-finite weight: no file is written then. `out` is the run's folder as
/// this rank sees it; `keeper` is used only on rank 0.
void save_checkpoint(const TrainedRanks& ranks, const std::string& out, const TrainState& state,
                     const ModelConfig& model, CheckpointKeeper* keeper);
/// Writes OUT/final/{config.json, model.safetensors, state.json}.
void save_final(const TrainedRanks& ranks, const std::string& out, const TrainState& state,
                const ModelConfig& model);
/// Loads weights, moments and error feedback residuals of a verified checkpoint. Residuals belong
/// to one rank of one layout: with another layout they start at zero. Returns a note about them, or
/// an empty string.
std::string load_checkpoint(const TrainedRanks& ranks, const std::string& path);

}  // namespace tandem
