#include "engine/check/layout_steps.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <span>
#include <utility>

#include "core/host_copy.h"
#include "core/machine.h"
#include "engine/data/sampler.h"
#include "engine/optim/learning_rate.h"
#include "engine/parallel/dims.h"
#include "engine/train/model_ranks.h"
#include "engine/train/step_exchange.h"
#include "engine/train/step_executor.h"
#include "gemm/gemm.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr float kMissing = std::numeric_limits<float>::quiet_NaN();

/// Order of the samples that gives every microbatch of the job those of the reference.
std::function<int64_t(int64_t)> make_order(const LayoutRun& run) {
  return [&run](int64_t sample) {
    const int64_t batch = run.config.train.batch, step = sample / batch;
    const int64_t position =
        ParallelDims(run.config)
            .microbatch_position(batch, microbatch_size(run.config), sample % batch);
    const int64_t ordered =
        step * batch +
        ParallelDims(run.reference).sample_at(batch, microbatch_size(run.reference), position);
    return run.hooks.samples ? run.hooks.samples(ordered) : ordered;
  };
}

void add_value(float value, float& min, float& max, uint8_t& is_set) {
  if (std::exchange(is_set, 1) == 0) min = max = value;
  // NaN stays: other values compare false with it.
  if (value < min || std::isnan(value)) min = value;
  if (value > max || std::isnan(value)) max = value;
}

/// Tensors that ranks add their shards to, each in its thread.
class Gather {
 public:
  /// Adds the elements of `values`, laid out as the parameters, that this rank's optimizer owns.
  void add(const ModelChunk& chunk, const Tensor& values) {
    const HostCopy copy(chunk.stage.exec(), values);
    std::vector<uint8_t> owned(copy.values().size());
    for (const StateSlice& slice : chunk.optimizer.slices(Moment::weights)) {
      std::fill_n(owned.begin() + slice.begin, slice.values.elements(), uint8_t{1});
    }
    const std::lock_guard lock(mutex_);
    for (const Parameter& p : chunk.stage.parameter_list()) add(p, copy.values(), owned);
  }

  GatheredTensors take() { return std::move(tensors_); }

 private:
  void add(const Parameter& p, std::span<const float> values, std::span<const uint8_t> owned) {
    int64_t elements = 1;
    for (const int64_t extent : p.shape) elements *= extent;
    GatheredTensor& tensor = tensors_[p.name];
    std::vector<uint8_t>& is_set = is_set_[p.name];
    tensor.shape = p.shape;
    tensor.min.resize(size_t(elements), kMissing);
    tensor.max.resize(size_t(elements), kMissing);
    is_set.resize(size_t(elements));
    const LocalShard shard = local_shard(p);
    for (int64_t row = 0; row < shard.rows; ++row) {
      for (int64_t column = 0; column < shard.columns; ++column) {
        const auto from = size_t(p.offset + row * shard.row_stride + column);
        const auto to = size_t(shard.first + row * shard.whole_columns + column);
        if (owned[from]) add_value(values[from], tensor.min[to], tensor.max[to], is_set[to]);
      }
    }
  }

  std::mutex mutex_;
  GatheredTensors tensors_;
  std::map<std::string, std::vector<uint8_t>> is_set_;
};

struct Gathers {
  Gather gradients, weights;
};

void initialize(Stage& stage, const LayoutRun& run) {
  if (!run.hooks.initialize) return stage.initialize(uint64_t(run.config.train.seed));
  run.hooks.initialize(stage);
  stage.parameters_changed();
}

/// On one rank. Returns the loss and the norm of the first step, the same on every rank.
StepsOutcome run_rank(Communicator& world, const LayoutRun& run, const Corpus& corpus,
                      Gathers& gathers) {
  const TrainConfig& config = run.config;
  set_kernel_threads(threads_per_rank(world.size()));
  const ParallelGroups groups(world, ParallelDims(config), config.model.experts > 0);
  const Sampler sampler(corpus, config.train.seq, uint64_t(config.train.seed), make_order(run));
  ModelRanks ranks(groups, config, {});
  StepExecutor executor(config, groups, corpus, sampler, ranks);
  for (ModelChunk& chunk : ranks.chunks) {
    initialize(chunk.stage, run);
    chunk.optimizer.adopt_weights();
  }
  executor.weights_changed();
  StepsOutcome outcome;
  for (int step = 0; step < run.steps; ++step) {
    if (run.hooks.before_step) run.hooks.before_step(groups, ranks);
    const int64_t first = step * config.train.batch, targets = executor.targets(first);
    StepExecutor::Result result = executor.compute(first, targets);
    if (!executor.read_error().empty()) throw IoError(executor.read_error());
    if (run.hooks.after_compute) {
      run.hooks.after_compute(groups, ranks, result.loss, result.squares);
    }
    StepSums sums;
    sums.loss = result.loss;
    sums.squares = result.squares;
    sums = exchange_sums(groups.world_axes(), sums);
    const double norm = std::sqrt(sums.squares);
    if (step == 0) {
      outcome.loss = sums.loss / double(targets);
      outcome.grad_norm = norm;
      for (const ModelChunk& chunk : ranks.chunks) {
        gathers.gradients.add(chunk, chunk.stage.gradients());
      }
    }
    if (run.steps == 1) return outcome;
    const double lr = learning_rate(config, step, 0, 0);
    executor.update(AdamStep::make(config, step, lr, norm));
  }
  executor.await_weights();
  for (const ModelChunk& chunk : ranks.chunks) {
    gathers.weights.add(chunk, chunk.stage.parameters());
  }
  return outcome;
}

}  // namespace

StepsOutcome run_steps(const LayoutRun& run, const Corpus& corpus) {
  WorldOptions world;
  world.ranks = ParallelDims(run.config).ranks();
  StepsOutcome outcome;
  Gathers gathers;
  run_threads(world, [&](Communicator& comm) {
    const StepsOutcome of_rank = run_rank(comm, run, corpus, gathers);
    if (comm.rank() == 0) outcome = of_rank;
  });
  outcome.gradients = gathers.gradients.take();
  outcome.weights = gathers.weights.take();
  return outcome;
}

}  // namespace tandem
