#include "engine/train/model_ranks.h"

#include <fmt/format.h>

#include <algorithm>

#include "engine/model/expert_load.h"
#include "engine/model/parameter_patterns.h"
#include "engine/train/step_executor.h"
#include "tandem/error.h"

namespace tandem {
namespace {

Strategy parse_strategy(const std::string& name) {
  for (const Strategy s : {Strategy::automatic, Strategy::serial, Strategy::overlapped}) {
    if (name == name_of(s)) return s;
  }
  throw ConfigError(fmt::format("parallel.strategy is \"{}\"", name));
}

TransformerOptions make_options(
    const ParallelGroups& groups, const TrainConfig& config,
    const std::function<void(int, int, const Tensor&, const Tensor&)>& routed) {
  TransformerOptions options;
  options.batch = microbatch_size(config);
  options.seq = config.train.seq;
  options.dtype = parse_dtype(config.train.dtype);
  options.overlap = {parse_strategy(config.parallel.strategy), int(config.parallel.chunks)};
  options.deterministic = config.train.deterministic;
  options.codec = CodecPolicy::parse(config.parallel.codec);
  options.experts = groups.experts();
  if (groups.experts()) options.step = groups.world_axes();
  if (routed) options.routed = std::bind_front(routed, groups.world().rank());
  return options;
}

/// The replicated parameters, and the experts of this EP rank.
std::vector<ParameterGroup> make_parameter_groups(const ParallelGroups& groups,
                                                  const TrainConfig& config,
                                                  const Transformer& model) {
  std::vector<Parameter> all_parameters = model.parameter_list();
  apply_patterns(config.optimizer.no_decay, config.optimizer.lr_scale, all_parameters);
  std::vector<Parameter> dense, experts;
  for (const Parameter& p : all_parameters) {
    (p.sharding.over_ep() ? experts : dense).push_back(p);
  }
  const int64_t begin = model.experts_begin();
  std::vector<ParameterGroup> all{{groups.dp(), {0, begin}, std::move(dense)}};
  if (groups.expert_dp()) {
    const int64_t count = model.parameters().elements() - begin;
    all.push_back({*groups.expert_dp(), {begin, count}, std::move(experts)});
  }
  return all;
}

int64_t bucket_elements(const TrainConfig& config, bool on_gpus) {
  const double elements = bucket_mib(config, on_gpus) * (1 << 20) / sizeof(float);
  return std::max<int64_t>(1, int64_t(elements));
}

ShardedOptimizerOptions make_optimizer_options(const ParallelGroups& groups,
                                               const TrainConfig& config,
                                               const Transformer& model) {
  const CodecPolicy codec = CodecPolicy::parse(config.parallel.codec);
  return {.gradients = codec.gradients,
          .weights = codec.weights,
          .error_feedback = config.parallel.error_feedback,
          .working = model.working_parameters(),
          .overlap = groups.tp().size() == 1 && !groups.experts(),
          .lamb_axes =
              config.optimizer.name == "lamb" ? groups.world_axes() : std::vector<Communicator*>{}};
}

}  // namespace

double bucket_mib(const TrainConfig& config, bool on_gpus) {
  if (config.parallel.dp_bucket_mib > 0) return config.parallel.dp_bucket_mib;
  return on_gpus ? 100 : 4;  // GPUs: a kernel of the optimizer is launched per bucket
}

ModelRanks::ModelRanks(const ParallelGroups& groups, const TrainConfig& config,
                       const std::function<void(int rank, int layer, const Tensor& scores,
                                                const Tensor& chosen)>& routed)
    : model(groups.tp(), config.model, make_options(groups, config, routed)),
      optimizer(model.exec(), model.parameters(), model.gradients(),
                make_parameter_groups(groups, config, model),
                bucket_elements(config, groups.world().on_gpu()),
                make_optimizer_options(groups, config, model)) {}

void ModelRanks::describe_experts(const TrainConfig& config, StepRecord& record) const {
  const std::optional<ExpertCounts> experts = model.expert_counts();
  if (!experts) return;
  for (int layer = 0; layer < int(experts->layers()); ++layer) {
    record.imbalance.push_back(experts->imbalance(layer, int(config.parallel.ep)));
    record.expert_imbalance.push_back(experts->imbalance(layer, int(config.model.experts)));
    const std::vector<double> counts = experts->of(layer);
    record.expert_rows.emplace_back(counts.begin(), counts.end());
  }
  if (config.model.aux_loss_coeff > 0) record.aux_loss = model.aux_loss();
}

}  // namespace tandem
