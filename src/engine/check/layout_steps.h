// First steps of a job in a layout, on threads of this process, with whole tensors assembled from
// the shards of all ranks.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "engine/config/config.h"
#include "engine/data/tokens/token_source.h"
#include "engine/model/stage.h"

namespace tandem {

class ParallelGroups;
struct ModelRanks;

/// Whole tensor, the smallest and the largest value of each element among the ranks that hold it:
/// tensor-parallel ranks have copies of norms. NaN if one is NaN or no rank holds the element.
struct GatheredTensor {
  std::vector<int64_t> shape;
  std::vector<float> min, max;
};
/// By name, which "learner 1, " precedes for all learners but the first.
using GatheredTensors = std::map<std::string, GatheredTensor>;

struct StepsOutcome {
  double loss = 0, grad_norm = 0;  ///< of the first step
  double aux_loss = 0;             ///< of the first step; 0 without
  GatheredTensors initial;         ///< weights of the first step, on all ranks that hold them
  GatheredTensors gradients;       ///< of the first step
  GatheredTensors weights;         ///< after the last step's update, if there are several steps
};

/// One rank in a step.
struct RankStep {
  const RunConfig& train;
  const ParallelGroups& groups;
  ModelRanks& ranks;
  double loss = 0, squares = 0;  ///< this rank's terms of the step's sums, after its passes
};

/// Called on every rank, in its thread. For tests.
struct StepHooks {
  /// Changes the job that the ranks run.
  std::function<void(TrainConfig& config)> config = {};
  /// Writes a stage's weights, instead of those of train.seed.
  std::function<void(Stage& stage)> initialize = {};
  std::function<void(RankStep&step)> before_step = {}, after_passes = {};
  ContextPasses context_passes = {};      ///< of TransformerOptions
  ExpertGradients expert_gradients = {};  ///< of TransformerOptions
  /// Maps samples after the layout's order.
  std::function<int64_t(const RunConfig& train, int dp, int64_t sample)> samples = {};
};

/// Job in a layout whose microbatches have the samples that they have in `reference`.
struct LayoutRun {
  TrainConfig config;
  TrainConfig reference;
  int steps = 1;
  StepHooks hooks = {};
};

/// Throws IoError if the text cannot be read.
StepsOutcome run_steps(const LayoutRun& run, const TokenSource& source);

}  // namespace tandem
