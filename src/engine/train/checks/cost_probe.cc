#include "engine/train/checks/cost_probe.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "core/random_buffer.h"
#include "core/system/process/clock.h"
#include "engine/optim/optimizer.h"
#include "engine/parallel/pipeline.h"
#include "engine/train/model_ranks.h"
#include "kernels/elementwise.h"
#include "observe/recorder.h"
#include "tandem/collectives.h"
#include "tandem/random.h"

namespace tandem {
namespace {

using ProbeClock = std::chrono::steady_clock;
using plan::LayerCost;

constexpr int kMaxProbes = 5;
constexpr double kProbeSeconds = .12;  // of repetitions
// Layers are probed in a row, since caches have forgotten a layer when the run comes back to it, up
// to this state of a rank: more than the caches of a processor.
constexpr double kMaxProbeBytes = 256e6;

/// Seconds of waits in the recorder.
double waited_seconds() {
  const PhaseTimes times = recorder().phase_times();
  double ms = 0;
  for (size_t i = 0; i < kPhases; ++i) ms += is_work(Phase(i)) ? 0 : times[i];
  return ms / 1e3;
}

double total_seconds(const LayerCost& cost) {
  double seconds = 0;
  for (const auto term : plan::kCostTerms) seconds += cost.*term;
  return seconds;
}

/// Adds `share` of `cost` to `sum`.
void add_cost(LayerCost& sum, const LayerCost& cost, double share) {
  for (const auto term : plan::kCostTerms) sum.*term += share * cost.*term;
}

/// Layers of a model with their optimizer, and the text of two microbatches: gradients are added to
/// those of another one.
class ProbedLayers {
 public:
  ProbedLayers(const TrainConfig& config, const ParallelGroups& groups, const StageLayers& layers)
      : model_(config.model),
        optimizer_(config.optimizer),
        layers_(layers),
        chunk_(groups, config,
               make_transformer_options(groups, config.parallel, config.train, config.data, {}),
               layers),
        microbatches_{chunk_.stage.make_microbatch(), chunk_.stage.make_microbatch()},
        splits_backward_(
            config.parallel.pp > 1 &&
            schedule::splits_backward(pipeline_shape(config.parallel, config.train).kind)),
        reduces_every_pass_(config.parallel.zero == 2),
        tokens_(size_t(microbatch_size(config.parallel, config.train) * config.train.seq)),
        seed_(uint64_t(groups.world().rank()) << 32) {
    chunk_.stage.initialize(uint64_t(config.train.seed));
    chunk_.optimizer.adopt_weights(chunk_.stage.parameter_staging());
    chunk_.stage.end_staging();
    chunk_.optimizer.state_changed();
  }

  /// One step: costs of its last microbatch, and of the update.
  LayerCost run() {
    chunk_.stage.begin_step(int64_t(microbatches_.size()));
    LayerCost cost;
    finished_.clear();
    for (Microbatch& microbatch : microbatches_) {
      cost = {};
      run_passes(microbatch, cost);
    }
    if (reduces_every_pass_) cost.dp_pass = std::exchange(cost.dp, 0);
    chunk_.stage.share_load();
    cost.update += pass(cost, Phase::update, [&] {
      for (const FlatRange& range : finished_) chunk_.optimizer.ready(range);
      chunk_.optimizer.reduce();
      chunk_.optimizer.update(AdamStep::make(optimizer_, 0, optimizer_.lr, 1));
      chunk_.optimizer.await_all();
    });
    return cost;
  }

 private:
  /// Returns the seconds of computation that is recorded; its waits and gaps are added to `cost`.
  static double pass(LayerCost& cost, Phase phase, const std::function<void()>& run) {
    const ScopedPhase scope(phase);
    recorder().reset();
    const auto begin = ProbeClock::now();
    run();
    const double seconds = seconds_since(begin);
    const PhaseTimes times = recorder().phase_times();
    const double computed = times[size_t(phase)] / 1e3;
    cost.tp += times[size_t(Phase::tp_wait)] / 1e3;
    cost.ep += times[size_t(Phase::ep_wait)] / 1e3;
    cost.dp += times[size_t(Phase::dp_wait)] / 1e3;
    const double gaps = seconds - computed - waited_seconds();
    phase == Phase::update ? cost.update += gaps : cost.gaps += gaps;
    return computed;
  }

  /// Every call has other tokens, since experts' GEMMs of new sizes take longer.
  void run_passes(Microbatch& microbatch, LayerCost& cost) {
    Stage& stage = chunk_.stage;
    ++seed_;
    for (size_t i = 0; i < tokens_.size(); ++i) {
      tokens_[i] = int32_t(philox(seed_, 0, i)[0] % uint64_t(model_.vocab));
    }
    if (!layers_.embedding) fill(stage.input(microbatch));
    cost.forward = pass(cost, Phase::forward, [&] { stage.forward(tokens_, tokens_, microbatch); });
    if (!layers_.head) fill(stage.residual_gradient());
    const bool is_last = &microbatch == &microbatches_.back();
    const auto ready = [&](FlatRange range) {
      if (chunk_.optimizer.reduces_every_pass(range)) {
        chunk_.optimizer.ready(range);
      } else if (is_last) {
        finished_.push_back(range);
      }
    };
    const float scale = 1.0f / float(tokens_.size());
    if (!splits_backward_) {
      cost.backward =
          pass(cost, Phase::backward, [&] { stage.backward(microbatch, scale, ready); });
      return;
    }
    cost.backward = pass(cost, Phase::backward, [&] { stage.backward_input(microbatch, scale); });
    cost.weight_gradients =
        pass(cost, Phase::weight_gradients, [&] { stage.backward_weight(microbatch, ready); });
  }

  /// Random numbers in [-1, 1).
  void fill(const Tensor& rows) const {
    std::vector<float> values(size_t(rows.elements()));
    for (size_t i = 0; i < values.size(); i += 4) {
      const auto random = philox(seed_, 1, i);
      for (size_t j = i; j < std::min(i + 4, values.size()); ++j) {
        values[j] = float(random[j - i]) / 0x1p31f - 1;
      }
    }
    cast({}, Tensor::of(std::span(values), {rows.dim(0), rows.dim(1)}), rows);
  }

  const ModelConfig& model_;
  const OptimizerConfig& optimizer_;
  StageLayers layers_;
  ModelChunk chunk_;
  std::array<Microbatch, 2> microbatches_;
  bool splits_backward_, reduces_every_pass_;
  std::vector<FlatRange> finished_;  // gradients that are reduced after the last pass
  std::vector<int32_t> tokens_;
  uint64_t seed_;
};

/// Mean of all ranks, or their largest total time.
struct RanksCost {
  LayerCost mean;
  double longest = 0;
};
RanksCost over_ranks(Communicator& world, const LayerCost& local) {
  RanksCost all;
  const double share = 1.0 / world.size();
  for (const auto& blob : world.exchange(std::as_bytes(std::span(&local, 1)), "costs")) {
    LayerCost rank;
    std::memcpy(&rank, blob.data(), sizeof rank);
    add_cost(all.mean, rank, share);
    all.longest = std::max(all.longest, total_seconds(rank));
  }
  return all;
}

/// Costs of the repetition of `layers` with the median time.
LayerCost probe(Communicator& world, ProbedLayers&& layers) {
  const double first = over_ranks(world, layers.run()).longest;  // warms caches
  const int repeats = std::clamp(int(kProbeSeconds / std::max(first, 1e-6)), 1, kMaxProbes);
  std::vector<LayerCost> costs;
  for (int i = 0; i < repeats; ++i) costs.push_back(over_ranks(world, layers.run()).mean);
  const auto middle = costs.begin() + repeats / 2;
  std::ranges::nth_element(costs, middle, {}, total_seconds);
  return *middle;
}

/// Seconds of a microbatch's activations to each of the other stages in turn, fastest of some.
/// `elements`: of a rank.
double probe_transfer(int64_t elements, Communicator& pp) {
  const Memory message = random_buffer(DType::f32, elements, 1);
  const Memory all(message.bytes() * size_t(pp.size()));
  double fastest = HUGE_VAL;
  for (int i = 0; i < kMaxProbes; ++i) {
    pp.barrier("transfer");
    const auto begin = ProbeClock::now();
    all_gather(pp, message.view(DType::f32, {elements}),
               all.view(DType::f32, {pp.size() * elements}));
    fastest = std::min(fastest, seconds_since(begin));
  }
  return fastest / (pp.size() - 1);
}

/// Layers of the largest chunk of a rank, or fewer if their state is large.
int64_t layers_in_a_row(const ModelConfig& model, const ParallelConfig& parallel) {
  int64_t longest = 1;
  for (const StageLayers& chunk : pipeline_layers(parallel, model.layers)) {
    longest = std::max(longest, chunk.count);
  }
  constexpr double kStateBytes = 16;  // of a parameter
  const double bytes =
      kStateBytes * double(model.parameters()) / double(model.layers * parallel.tp);
  return std::clamp(int64_t(kMaxProbeBytes / bytes), int64_t{1}, longest);
}

}  // namespace

plan::MeasuredCosts measure_costs(const TrainConfig& config, const ParallelGroups& groups) {
  const auto kind_of = [&](int64_t layer) {  // by experts and window
    return std::pair(config.model.is_moe(layer), config.model.window(layer));
  };
  const int64_t limit = layers_in_a_row(config.model, config.parallel);
  // As many layers of one kind as follow `first`.
  const auto row_of = [&](int64_t first) {
    StageLayers row{.first = first, .count = 1, .embedding = false, .head = false};
    while (row.count < limit && first + row.count < config.model.layers &&
           kind_of(first + row.count) == kind_of(first)) {
      ++row.count;
    }
    return row;
  };
  std::map<std::pair<bool, int64_t>, LayerCost> kinds;
  plan::MeasuredCosts costs;
  for (int64_t layer = 0; layer < config.model.layers; ++layer) {
    const auto [found, is_new] = kinds.try_emplace(kind_of(layer));
    if (is_new) {
      const StageLayers row = row_of(layer);
      add_cost(found->second, probe(groups.world(), {config, groups, row}), 1 / double(row.count));
    }
    add_cost(costs.layer, found->second, 1 / double(config.model.layers));
  }
  StageLayers with_ends = row_of(0);
  with_ends.embedding = with_ends.head = true;
  costs.ends = probe(groups.world(), {config, groups, with_ends});
  add_cost(costs.ends, kinds.at(kind_of(0)), -double(with_ends.count));
  for (const auto term : plan::kCostTerms) costs.ends.*term = std::max(0.0, costs.ends.*term);
  if (groups.pp()) {
    const int64_t rows = microbatch_tokens(config.parallel, config.train) / config.parallel.tp;
    costs.transfer = probe_transfer(rows * config.model.hidden, *groups.pp());
  }
  return costs;
}

}  // namespace tandem
