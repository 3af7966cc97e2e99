// First steps of a job in a layout, on threads of this process, with whole tensors assembled from
// the shards of all ranks.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "engine/config/config.h"
#include "engine/data/corpus.h"

namespace tandem {

class ParallelGroups;
class Stage;
struct ModelRanks;

/// Whole tensor, the smallest and the largest value of each element among the ranks that hold it:
/// tensor-parallel ranks have copies of norms. NaN if one is NaN or no rank holds the element.
struct GatheredTensor {
  std::vector<int64_t> shape;
  std::vector<float> min, max;
};
using GatheredTensors = std::map<std::string, GatheredTensor>;  ///< by name

struct StepsOutcome {
  double loss = 0, grad_norm = 0;  ///< of the first step
  GatheredTensors gradients;       ///< of the first step
  GatheredTensors weights;         ///< after the last step's update, if there are several steps
};

/// Called on every rank, in its thread, in every step. For tests.
struct StepHooks {
  std::function<void(const ParallelGroups& groups, ModelRanks& ranks)> before_step = {};
  /// `loss`, `squares`: this rank's terms of the step's sums.
  std::function<void(const ParallelGroups& groups, ModelRanks& ranks, double& loss,
                     double& squares)>
      after_compute = {};
  /// Maps samples after the layout's order.
  std::function<int64_t(int64_t sample)> samples = {};
  /// Writes a stage's weights, instead of those of train.seed.
  std::function<void(Stage& stage)> initialize = {};
};

/// Job in a layout whose microbatches have the samples that they have in `reference`.
struct LayoutRun {
  TrainConfig config;
  TrainConfig reference;
  int steps = 1;
  StepHooks hooks = {};
};

/// Throws IoError if the text cannot be read.
StepsOutcome run_steps(const LayoutRun& run, const Corpus& corpus);

}  // namespace tandem
