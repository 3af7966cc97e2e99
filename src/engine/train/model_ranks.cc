#include "engine/train/model_ranks.h"

#include <fmt/format.h>

#include <algorithm>

#include "engine/model/expert_load.h"
#include "engine/model/parameter_patterns.h"
#include "engine/parallel/dims.h"
#include "engine/parallel/pipeline.h"
#include "engine/parallel/step_placements.h"
#include "engine/parallel/sync/demo.h"
#include "tandem/collectives.h"
#include "tandem/error.h"
#include "tune/gemm_choices.h"

namespace tandem {
namespace {

Strategy parse_strategy(const std::string& name) {
  for (const Strategy s : {Strategy::automatic, Strategy::serial, Strategy::overlapped}) {
    if (name == name_of(s)) return s;
  }
  throw ConfigError(fmt::format("parallel.strategy is \"{}\"", name));
}

/// The replicated parameters, and the experts of this EP rank.
std::vector<ParameterGroup> make_parameter_groups(const ParallelGroups& groups,
                                                  const ParallelConfig& parallel,
                                                  const OptimizerConfig& optimizer,
                                                  const Stage& stage) {
  const GradientWindow window = gradient_window(parallel, groups.on_gpus());
  std::vector<Parameter> all_parameters = stage.parameter_list();
  apply_patterns(optimizer.no_decay, optimizer.lr_scale, all_parameters);
  std::vector<ParameterGroup> all;
  for (CopiedParameters& copied : split_experts(all_parameters)) {
    Communicator* const copies = groups.along(copied.copies);
    if (!copies) continue;  // no experts
    const int64_t begin = stage.experts_begin();
    const bool is_dense = copied.copies == kCopies;
    const ParallelGroups::SplitGroups state = groups.state_groups(copied.copies);
    const ParallelGroups::SplitGroups host = groups.host_groups(copied.copies);
    std::vector<FlatRange> undivided;
    if (parallel.sync.is_demo() && copies->size() > 1) {
      undivided = tile_rows(copied.list, parallel.sync.tile_side());
    }
    all.push_back(
        {*copies, is_dense ? FlatRange{0, begin} : FlatRange{begin, stage.experts_end() - begin},
         std::move(copied.list), is_dense ? stage.dense_window() : stage.experts_window(),
         is_dense ? window.dense : window.experts, window.every_pass, parallel.replicates_state(),
         state.group, state.across, host.group, host.across,
         groups.dims().gradients(copied.copies, groups.world().rank()), std::move(undivided)});
  }
  return all;
}

ShardedOptimizerOptions make_optimizer_options(const ParallelGroups& groups,
                                               const ParallelConfig& parallel,
                                               const OptimizerConfig& optimizer,
                                               const StateCheckOptions& check, Stage& stage) {
  const CodecPolicy codec = CodecPolicy::parse(parallel.codec);
  return {.gradients = codec.gradients,
          .weights = codec.weights,
          .error_feedback = parallel.error_feedback,
          .overlap = groups.tp().size() == 1 && !groups.experts(),
          .gradient_memory = &stage.gradient_memory(),
          .optimizer = parallel.sync.is_demo() ? kDemoOptimizer : find_optimizer(optimizer.name),
          .norm_axes = groups.stage_axes(),
          .check = check,
          .outer = outer_moments(parallel.sync)};
}

}  // namespace

TransformerOptions make_transformer_options(
    const ParallelGroups& groups, const ParallelConfig& parallel, const RunConfig& train,
    const DataConfig& data,
    const std::function<void(int, int, const Tensor&, const Tensor&)>& routed) {
  TransformerOptions options;
  options.batch = microbatch_size(parallel, train);
  options.seq = train.seq;
  options.dtype = train.activation_dtype();
  options.gradient_dtype = parse_dtype(train.gradient_dtype);
  options.residual_gradient = parse_dtype(train.residual_gradient);
  options.head_rows = train.head_rows;
  options.fp8 = train.is_fp8();
  options.fp8_weight_gradients = train.fp8_weight_gradients;
  options.fp8_experts = train.is_fp8() && !groups.on_gpus();
  options.fp8_scales = train.fp8_scales;
  options.overlap = {parse_strategy(parallel.strategy), int(parallel.chunks)};
  options.documents = data.document_mask;
  options.deterministic = train.deterministic;
  options.recompute = {parse_recompute(train.recompute), train.recompute_layers};
  options.moe_save = parse_moe_save(train.moe_save);
  options.codec = CodecPolicy::parse(parallel.codec);
  options.gradient_window = gradient_window(parallel, groups.on_gpus());
  options.f32_weights = !options.codec.weights.is_none();
  options.context = groups.cp();
  options.experts = groups.experts();
  if (groups.experts()) options.step = groups.stage_axes();
  if (routed) options.routed = std::bind_front(routed, groups.world().rank());
  return options;
}

ModelChunk::ModelChunk(const ParallelGroups& groups, const TrainConfig& config,
                       const TransformerOptions& options, const StageLayers& layers)
    : stage(groups.tp(), config.model, options, layers),
      optimizer(stage.exec(), stage.weights(), stage.gradients(),
                make_parameter_groups(groups, config.parallel, config.optimizer, stage),
                bucket_elements(config.parallel, groups.on_gpus()),
                make_optimizer_options(groups, config.parallel, config.optimizer,
                                       {config.check.action == "off" ? 0 : config.check.state,
                                        config.model.router_bias_update_rate > 0},
                                       stage)) {}

ModelRanks::ModelRanks(const ParallelGroups& groups, const TrainConfig& config,
                       const std::function<void(int rank, int layer, const Tensor& scores,
                                                const Tensor& chosen)>& routed,
                       const ContextPasses& passes, const ExpertGradients& expert_gradients)
    : model(config.model), groups_(groups) {
  const ParallelConfig& parallel = config.parallel;
  step_placements(model, parallel);  // throws if an operator of the step cannot consume a tensor
  const schedule::PipelineShape shape = pipeline_shape(parallel, config.train);
  const std::vector<StageLayers> layers = pipeline_layers(parallel, model.layers);
  const int rank = groups.pp() ? groups.pp()->rank() : 0;
  // Replicas and stages, whose tensor-parallel groups would choose independently, agree.
  share_gemm_choices(groups.world());
  for (int chunk = 0; chunk < shape.chunks; ++chunk) {
    TransformerOptions options =
        make_transformer_options(groups, parallel, config.train, config.data, routed);
    options.context_passes = passes;
    options.expert_gradients = expert_gradients;
    chunks.emplace_back(groups, config, options,
                        layers[size_t(schedule::stage_of(shape, rank, chunk))]);
  }
  agree_on_gemm_choices(groups.world());
}

std::vector<Stage*> ModelRanks::stages() {
  std::vector<Stage*> stages;
  for (ModelChunk& chunk : chunks) stages.push_back(&chunk.stage);
  return stages;
}

void ModelRanks::copy_weights(Stage& whole) const {
  const Tensor values = whole.parameters();
  clear(whole.exec(), values);
  for (const ModelChunk& chunk : chunks) {
    const Stage& stage = chunk.stage;
    const auto copy_owned = [&](const StateSlice& slice, const FlatWindow& window, int64_t from,
                                int64_t to) {
      for (const WindowRange& range : window.ranges) {
        const int64_t begin = std::max(slice.begin - from, range.local);
        const int64_t end =
            std::min(slice.begin - from + slice.values.elements(), range.local + range.count);
        if (begin >= end) continue;
        copy(whole.exec(), slice.values.narrow(0, begin + from - slice.begin, end - begin),
             values.narrow(0, to + range.whole + begin - range.local, end - begin));
      }
    };
    for (const StateSlice& slice : chunk.optimizer.slices(Moment::weights)) {
      if (slice.begin < stage.experts_begin()) {
        copy_owned(slice, stage.dense_window(), 0, 0);
      } else {
        copy_owned(slice, stage.experts_window(), stage.experts_begin(), whole.experts_begin());
      }
    }
  }
  // One term of each sum is not zero.
  const auto add_along = [&](Communicator* axis, int64_t begin, int64_t end) {
    if (axis && axis->size() > 1 && end > begin) {
      all_reduce(*axis, values.narrow(0, begin, end - begin));
    }
  };
  add_along(groups_.along(kCopies), 0, whole.experts_begin());
  add_along(groups_.along(kExpertCopies), whole.experts_begin(), whole.experts_end());
  add_along(groups_.pp(), 0, values.elements());
}

std::vector<OuterSync::Stage> ModelRanks::outer_stages(const OptimizerConfig& optimizer) {
  std::vector<OuterSync::Stage> all;
  for (ModelChunk& chunk : chunks) {
    all.push_back({chunk.stage.exec(), chunk.optimizer, chunk.stage.parameter_list()});
    apply_patterns(optimizer.no_decay, optimizer.lr_scale, all.back().list);
  }
  return all;
}

ShardedOptimizer::Sent ModelRanks::take_sent() {
  ShardedOptimizer::Sent sent;
  for (ModelChunk& chunk : chunks) sent = sent + chunk.optimizer.take_sent();
  return sent;
}

double ModelRanks::per_parameter(size_t (ShardedOptimizer::*bytes)() const) const {
  size_t sum = 0;
  int64_t elements = 0;
  for (const ModelChunk& chunk : chunks) {
    sum += (chunk.optimizer.*bytes)();
    elements += chunk.optimizer.elements();
  }
  return double(sum) / double(std::max<int64_t>(elements, 1));
}

double ModelRanks::state_bytes_per_parameter() const {
  return per_parameter(&ShardedOptimizer::state_bytes);
}

std::string ModelRanks::describe_state() const {
  return fmt::format(
      "memory: {:.1f} bytes a parameter and rank for weights, gradients, optimizer and messages",
      per_parameter(&ShardedOptimizer::bytes));
}

namespace {

/// Sums over the stages, in their order.
std::vector<double> sum_stages(Communicator* pp, std::vector<double> values) {
  if (!pp) return values;
  std::vector<double> sums(values.size());
  for (const auto& blob : pp->exchange(std::as_bytes(std::span(values)), "experts of the stages")) {
    const auto* const of_rank = reinterpret_cast<const double*>(blob.data());
    for (size_t i = 0; i < sums.size(); ++i) sums[i] += of_rank[i];
  }
  return sums;
}

}  // namespace

void ModelRanks::describe_experts(StepRecord& record) const {
  if (model.experts == 0) return;
  ExpertCounts experts{model.experts, {}};
  std::vector<double> values(1);  // the auxiliary loss, then the rows
  for (const ModelChunk& chunk : chunks) {
    const ExpertCounts of_chunk = *chunk.stage.expert_counts();
    values.resize(1 + of_chunk.rows.size());
    if (model.aux_loss_coeff > 0) values[0] += chunk.stage.aux_loss();
    for (size_t i = 0; i < of_chunk.rows.size(); ++i) values[1 + i] += of_chunk.rows[i];
  }
  values = sum_stages(groups_.pp(), std::move(values));
  experts.rows.assign(values.begin() + 1, values.end());
  for (int layer = 0; layer < int(experts.layers()); ++layer) {
    record.imbalance.push_back(experts.imbalance(layer, groups_.dims().ep()));
    record.expert_imbalance.push_back(experts.imbalance(layer, int(model.experts)));
    const std::vector<double> counts = experts.of(layer);
    record.expert_rows.emplace_back(counts.begin(), counts.end());
  }
  if (model.aux_loss_coeff > 0) record.aux_loss = values[0];
}

}  // namespace tandem
