// The ranks' part in saving and resuming: every rank writes and reads what it holds of the whole,
// unsharded tensors on disk (engine/checkpoint/shared_tensors.h), so any TP x DP can resume from
// what another left. All functions are collective, and over a whole world.
#pragma once

#include <string>

#include "engine/checkpoint/checkpoint.h"
#include "engine/model/transformer.h"
#include "engine/parallel/data_parallel.h"

namespace tandem {

struct TrainedRanks {
  Communicator& world;
  std::string layout;  ///< what must be the same for residuals to be of use
  Communicator& tp;
  Transformer& model;
  DataParallel& optimizer;
  DataParallel* expert_optimizer = nullptr;  ///< of the experts' part, where there are some
  /// About what a checkpoint holds.
  uint64_t bytes() const { return 3 * model.parameters().size_bytes() * uint64_t(tp.size()); }
};

/// Returns once rank 0 has committed and pruned; what goes wrong on any rank is thrown on all, a
/// weight that is no finite number included: no file is written then.
/// `out` is the run's folder as this rank sees it; `keeper` matters on rank 0 alone.
void save_checkpoint(const TrainedRanks& ranks, const std::string& out, const TrainState& state,
                     const ModelConfig& model, CheckpointKeeper* keeper);
/// OUT/final/{config.json, model.safetensors, state.json}.
void save_final(const TrainedRanks& ranks, const std::string& out, const TrainState& state,
                const ModelConfig& model);
/// Weights, moments and the residuals of error feedback of a verified checkpoint. Residuals are of
/// one rank of one layout: in a run of another they start at zero. Returns what there is to say of
/// them, or nothing.
std::string load_checkpoint(const TrainedRanks& ranks, const std::string& path);

}  // namespace tandem
