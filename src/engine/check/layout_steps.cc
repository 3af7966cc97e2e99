#include "engine/check/layout_steps.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <optional>
#include <span>
#include <utility>

#include "core/host_copy.h"
#include "core/system/machine.h"
#include "engine/data/sampler.h"
#include "engine/optim/learning_rate.h"
#include "engine/parallel/dims.h"
#include "engine/train/model_ranks.h"
#include "engine/train/records/step_record.h"
#include "engine/train/step_exchange.h"
#include "engine/train/step_executor.h"
#include "gemm/gemm.h"
#include "kernels/elementwise.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr float kMissing = std::numeric_limits<float>::quiet_NaN();

/// Order of the samples that gives every microbatch of the job those of the reference.
std::function<int64_t(int64_t)> make_order(const LayoutRun& run) {
  const ParallelDims dims(run.config.parallel), reference(run.reference.parallel);
  const int64_t microbatch = microbatch_size(run.config.parallel, run.config.train),
                other = microbatch_size(run.reference.parallel, run.reference.train);
  return [&run, dims, reference, microbatch, other](int64_t sample) {
    const int64_t batch = run.config.train.batch, step = sample / batch;
    const int64_t position = dims.microbatch_position(batch, microbatch, sample % batch);
    const int64_t ordered = step * batch + reference.sample_at(batch, other, position);
    return run.hooks.samples ? run.hooks.samples(run.config.train, dims.dp(), ordered) : ordered;
  };
}

void add_value(float value, float& min, float& max, uint8_t& is_set) {
  if (std::exchange(is_set, 1) == 0) min = max = value;
  // NaN stays: other values compare false with it.
  if (value < min || std::isnan(value)) min = value;
  if (value > max || std::isnan(value)) max = value;
}

/// This rank's shard of a tied embedding that is a parameter of another stage.
std::optional<Parameter> tied_copy(const Stage& stage, const Communicator& tp) {
  const auto range = stage.tied_embedding();
  if (!range || range->end() <= stage.experts_end()) return {};
  Parameter copy =
      *std::ranges::find(stage.parameter_list(), "model.embed_tokens.weight", &Parameter::name);
  const Shard rows = shard_of(copy.shape[0], tp.size(), tp.rank());
  copy.sharding = {.tp_dim = 0, .begin = rows.begin, .count = rows.count};
  copy.offset = range->begin;
  copy.row_stride = copy.shape[1];
  return copy;
}

/// Begins the names of a learner's tensors; empty for the first one's.
std::string name_learner(const ParallelGroups& groups) {
  const int learner = groups.dims().learner(groups.world().rank());
  return learner == 0 ? "" : fmt::format("learner {}, ", learner);
}

/// Tensors that ranks add their shards to, each in its thread.
class Gather {
 public:
  /// Adds the gradients of elements that this rank's optimizer owns.
  void add_gradients(const ModelChunk& chunk, const ParallelGroups& groups) {
    add_owned(chunk, chunk.optimizer.reduced_gradients(), groups);
  }

  /// Adds the weights that this rank's optimizer owns.
  void add_owned_weights(const ModelChunk& chunk, const ParallelGroups& groups) {
    add_owned(chunk, chunk.optimizer.slices(Moment::weights), groups);
  }

  /// Adds all weights as passes read them, also copies.
  void add_weights(const Stage& stage, const ParallelGroups& groups) {
    std::vector<Parameter> list = stage.parameter_list();
    if (const auto copy = tied_copy(stage, groups.tp())) list.push_back(*copy);
    const int64_t elements = stage.weights().elements();
    const Memory memory(size_t(elements) * sizeof(float), stage.exec().device);
    const Tensor weights = memory.view(DType::f32, {elements});
    stage.read_parameters(weights);
    add(list, HostCopy(stage.exec(), weights).tensor(), std::vector<uint8_t>(size_t(elements), 1),
        name_learner(groups));
  }

  GatheredTensors take() { return std::move(tensors_); }

 private:
  void add_owned(const ModelChunk& chunk, const std::vector<StateSlice>& slices,
                 const ParallelGroups& groups) {
    std::vector<float> all(size_t(chunk.stage.weights().elements()));
    std::vector<uint8_t> owned(all.size());
    for (const StateSlice& slice : slices) {
      const std::vector<float> values = read_f32(chunk.stage.exec(), slice.values);
      std::ranges::copy(values, all.begin() + slice.begin);
      std::fill_n(owned.begin() + slice.begin, slice.values.elements(), uint8_t{1});
    }
    add(chunk.stage.parameter_list(), host_tensor(all), owned, name_learner(groups));
  }
  void add(std::span<const Parameter> list, const Tensor& values, std::span<const uint8_t> owned,
           const std::string& prefix) {
    const std::lock_guard lock(mutex_);
    for (const Parameter& p : list) add(p, values, owned, prefix + p.name);
  }
  void add(const Parameter& p, const Tensor& values, std::span<const uint8_t> owned,
           const std::string& name) {
    int64_t elements = 1;
    for (const int64_t extent : p.shape) elements *= extent;
    GatheredTensor& tensor = tensors_[name];
    std::vector<uint8_t>& is_set = is_set_[name];
    tensor.shape = p.shape;
    tensor.min.resize(size_t(elements), kMissing);
    tensor.max.resize(size_t(elements), kMissing);
    is_set.resize(size_t(elements));
    const LocalShard shard = local_shard(p);
    for (int64_t row = 0; row < shard.rows; ++row) {
      for (int64_t column = 0; column < shard.columns; ++column) {
        const auto from = size_t(p.offset + row * shard.row_stride + column);
        const auto to = size_t(shard.first + row * shard.whole_columns + column);
        if (owned[from])
          add_value(values.as<const float>()[from], tensor.min[to], tensor.max[to], is_set[to]);
      }
    }
  }

  std::mutex mutex_;
  GatheredTensors tensors_;
  std::map<std::string, std::vector<uint8_t>> is_set_;
};

struct Gathers {
  Gather initial, gradients, weights;
};

void initialize(Stage& stage, const LayoutRun& run) {
  if (!run.hooks.initialize) return stage.initialize(uint64_t(run.config.train.seed));
  run.hooks.initialize(stage);
  stage.parameters_changed();
}

/// On one rank. Returns the numbers of the first step, the same on every rank.
StepsOutcome run_rank(Communicator& world, const LayoutRun& run, const TokenSource& source,
                      Gathers& gathers) {
  const KernelThreads threads(threads_per_rank(world.size()));
  const ParallelGroups groups(world, ParallelDims(run.config.parallel),
                              run.config.model.experts > 0);
  const RunConfig& train = run.config.train;
  const Sampler sampler(source, train.seq, uint64_t(train.seed),
                        make_sampler_options(run.config.data, make_order(run)));
  ModelRanks ranks(groups, run.config, {}, run.hooks.context_passes, run.hooks.expert_gradients);
  StepExecutor executor(train, run.config.parallel, groups, source, sampler, ranks);
  for (ModelChunk& chunk : ranks.chunks) {
    initialize(chunk.stage, run);
    chunk.optimizer.adopt_weights(chunk.stage.parameter_staging());
    chunk.stage.end_staging();
  }
  executor.weights_changed();
  StepsOutcome outcome;
  for (int step = 0; step < run.steps; ++step) {
    RankStep rank{train, groups, ranks};
    if (run.hooks.before_step) run.hooks.before_step(rank);
    if (step == 0) {
      for (const ModelChunk& chunk : ranks.chunks) {
        gathers.initial.add_weights(chunk.stage, groups);
      }
    }
    const int64_t first = step * train.batch, targets = executor.targets(first);
    const StepExecutor::Result result = executor.compute(first, targets);
    if (!executor.read_error().empty()) throw IoError(executor.read_error());
    rank.loss = result.loss;
    rank.squares = result.squares;
    if (run.hooks.after_passes) run.hooks.after_passes(rank);
    StepSums sums;
    sums.loss = rank.loss;
    sums.squares = rank.squares;
    sums = exchange_sums(groups, sums);
    const double norm = std::sqrt(sums.learner_squares);
    if (step == 0) {
      outcome.loss = sums.loss / double(targets);
      outcome.grad_norm = std::sqrt(sums.squares / groups.dims().learners());
      StepRecord record;
      ranks.describe_experts(record);
      outcome.aux_loss = record.aux_loss.value_or(0);
      for (const ModelChunk& chunk : ranks.chunks) {
        gathers.gradients.add_gradients(chunk, groups);
      }
    }
    if (run.steps == 1) return outcome;
    const double lr = learning_rate(run.config.optimizer, run.config.train, step, 0, 0);
    executor.update(AdamStep::make(run.config.optimizer, step, lr, norm));
  }
  executor.await_weights();
  for (const ModelChunk& chunk : ranks.chunks) {
    gathers.weights.add_owned_weights(chunk, groups);
  }
  return outcome;
}

}  // namespace

StepsOutcome run_steps(const LayoutRun& requested, const TokenSource& source) {
  LayoutRun run = requested;
  if (run.hooks.config) run.hooks.config(run.config);
  WorldOptions world;
  world.ranks = ParallelDims(run.config.parallel).ranks();
  StepsOutcome outcome;
  Gathers gathers;
  run_threads(world, [&](Communicator& comm) {
    const StepsOutcome of_rank = run_rank(comm, run, source, gathers);
    if (comm.rank() == 0) outcome = of_rank;
  });
  outcome.initial = gathers.initial.take();
  outcome.gradients = gathers.gradients.take();
  outcome.weights = gathers.weights.take();
  return outcome;
}

}  // namespace tandem
