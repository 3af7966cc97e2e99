// Model of a training run and its optimizer on one rank.
#pragma once

#include <functional>

#include "engine/config/config.h"
#include "engine/model/transformer.h"
#include "engine/parallel/dims.h"
#include "engine/parallel/sharded_optimizer.h"
#include "engine/train/step_record.h"

namespace tandem {

struct ModelRanks {
  /// `routed`: as TrainRequest's. `groups` must outlive this object. Collective.
  ModelRanks(const ParallelGroups& groups, const TrainConfig& config,
             const std::function<void(int rank, int layer, const Tensor& scores,
                                      const Tensor& chosen)>& routed);

  /// Fills the record of a step of a MoE model.
  void describe_experts(const TrainConfig& config, StepRecord& record) const;

  Transformer model;
  ShardedOptimizer optimizer;
};

/// parallel.dp_bucket_mib, or what is chosen for it.
double bucket_mib(const TrainConfig& config, bool on_gpus);

}  // namespace tandem
