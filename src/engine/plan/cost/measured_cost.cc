#include "engine/plan/cost/measured_cost.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "engine/parallel/dims.h"
#include "engine/parallel/pipeline.h"
#include "engine/parallel/sharded/buckets.h"
#include "schedule/pipeline_simulation.h"

namespace tandem::plan {
namespace {

/// Layers of every pipeline rank, and the rank with the head.
struct RankLayers {
  std::vector<double> counts;
  size_t head = 0;
};

RankLayers rank_layers(const std::vector<tandem::StageLayers>& stages, int pp) {
  RankLayers ranks{std::vector<double>(size_t(pp)), 0};
  for (const tandem::StageLayers& stage : stages) {
    ranks.counts[size_t(stage.pp_rank)] += double(stage.count);
    if (stage.head) ranks.head = size_t(stage.pp_rank);
  }
  return ranks;
}

/// Idle time of the schedule as a share of a rank's passes.
double bubble_share(const schedule::PipelineShape& shape, const schedule::PassCosts& costs) {
  if (shape.ranks == 1) return 0;
  const double passes = shape.microbatches * shape.chunks *
                        (costs.forward + costs.backward_input + costs.backward_weight);
  return simulate(shape, pipeline_actions(shape), costs).makespan / passes - 1;
}

Factors unit_factors() {
  Factors factors{};
  for (const Term term : {Term::gemm, Term::launch, Term::tp, Term::ep, Term::bubble, Term::dp,
                          Term::optimizer, Term::head, Term::imbalance, Term::software}) {
    factors[size_t(term)] = 1;
  }
  return factors;
}

}  // namespace

StepTime predict_step(const TrainConfig& config, const MeasuredCosts& costs) {
  const auto layers = double(config.model.layers), stages = double(config.parallel.pp);
  const schedule::PipelineShape shape = pipeline_shape(config.parallel, config.train);
  const ParallelDims dims(config.parallel);
  const RankLayers ranks =
      rank_layers(pipeline_layers(config.parallel, config.model.layers), dims.pp());
  StepWork work;
  work.layer.gemm = costs.layer.compute();
  work.layer.launch = costs.layer.gaps + costs.ends.gaps / layers;
  work.layer.tp = costs.layer.tp + costs.ends.tp / layers;
  work.layer.ep = costs.layer.ep + costs.ends.ep / layers;
  work.head_gemm = costs.ends.compute();
  work.mean_layers = layers / stages;
  work.stage_layers = std::ranges::max(ranks.counts);
  work.last_stage_layers = ranks.counts[ranks.head];
  work.stages = stages;
  work.microbatches = shape.microbatches * dims.rounds();
  const double chunk_layers = work.mean_layers / shape.chunks;
  const double others = (work.layer.launch + work.layer.tp + work.layer.ep) / 2;
  const double backward = costs.layer.backward + others;
  const double weight = costs.layer.weight_gradients;
  const bool is_split = weight > 0;
  work.bubble =
      bubble_share(shape, {.forward = chunk_layers * (costs.layer.forward + others),
                           .backward_input = chunk_layers * (is_split ? backward : backward / 2),
                           .backward_weight = chunk_layers * (is_split ? weight : backward / 2),
                           .transfer = costs.transfer});
  const double sums = work.mean_layers * costs.layer.dp + costs.ends.dp / stages;
  const double buckets = double(config.model.parameters()) / double(dims.tp() * dims.pp()) /
                         double(bucket_elements(config.parallel, false));  // of a rank's gradients
  const double last_bucket = sums / std::max(1.0, std::ceil(buckets));
  work.dp = sums - last_bucket;
  work.optimizer = work.mean_layers * costs.layer.update + costs.ends.update / stages;
  Factors factors = unit_factors();
  factors[size_t(Term::window)] =
      (costs.layer.backward + weight) / (costs.layer.compute() + 2 * others);
  StepTime time = step_time(work, factors);
  const double gaps = work.microbatches * work.mean_layers * work.layer.launch;
  time.compute -= gaps;
  time.fixed += gaps;
  const double passes =
      work.microbatches * (work.mean_layers * costs.layer.dp_pass + costs.ends.dp_pass / stages);
  time.exposed_dp += last_bucket + passes;
  time.total += last_bucket + passes;
  return time;
}

}  // namespace tandem::plan
