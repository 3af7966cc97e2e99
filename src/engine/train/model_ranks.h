// Model of a training run and its optimizer on one rank.
#pragma once

#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "engine/config/config.h"
#include "engine/model/stage.h"
#include "engine/parallel/dims.h"
#include "engine/parallel/sharded/sharded_optimizer.h"
#include "engine/parallel/sync/outer_sync.h"
#include "engine/train/records/step_record.h"

namespace tandem {

/// Options of the run's stages. `routed`: as TrainRequest's.
TransformerOptions make_transformer_options(
    const ParallelGroups& groups, const ParallelConfig& parallel, const RunConfig& train,
    const DataConfig& data,
    const std::function<void(int rank, int layer, const Tensor& scores, const Tensor& chosen)>&
        routed);

/// A pipeline stage, or the whole model, and its optimizer.
struct ModelChunk {
  /// Collective over the ranks of the pipeline stage.
  ModelChunk(const ParallelGroups& groups, const TrainConfig& config,
             const TransformerOptions& options, const StageLayers& layers);

  Stage stage;
  ShardedOptimizer optimizer;
};

struct ModelRanks {
  /// `routed`: as TrainRequest's; `passes`, `expert_gradients`: as TransformerOptions'. `groups`
  /// must outlive this object. Collective.
  ModelRanks(const ParallelGroups& groups, const TrainConfig& config,
             const std::function<void(int rank, int layer, const Tensor& scores,
                                      const Tensor& chosen)>& routed,
             const ContextPasses& passes = {}, const ExpertGradients& expert_gradients = {});

  std::vector<Stage*> stages();
  std::vector<OuterSync::Stage> outer_stages(const OptimizerConfig& optimizer);
  /// Copies the owners' weights of all stages to `whole`, this rank's shard of the same model
  /// without stages. Collective over the replicas and the pipeline's ranks.
  void copy_weights(Stage& whole) const;
  /// Bytes sent by this rank since the last call.
  ShardedOptimizer::Sent take_sent();
  /// Bytes of this rank's weights, gradients and optimizer state, over its parameters.
  double state_bytes_per_parameter() const;
  /// "memory: 16.2 bytes a parameter and rank for …"
  std::string describe_state() const;
  /// Fills the record of a step of a MoE model. Collective over the pipeline's ranks.
  void describe_experts(StepRecord& record) const;

  const ModelConfig model;        ///< of all stages
  std::deque<ModelChunk> chunks;  ///< of the pipeline rank, in the order of schedule::stage_of

 private:
  double per_parameter(size_t (ShardedOptimizer::*bytes)() const) const;

  const ParallelGroups& groups_;
};

}  // namespace tandem
