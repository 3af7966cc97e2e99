#include "bench/engine/bench_train.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <thread>
#include <utility>

#include "comm/exec.h"
#include "core/system/console.h"
#include "engine/config/gpu_training.h"
#include "engine/model/published_models.h"
#include "engine/model/stage.h"
#include "engine/parallel/dims.h"
#include "engine/plan/cost/memory.h"
#include "engine/plan/cost/utilization.h"
#include "engine/report/progress.h"
#include "kernels/elementwise.h"
#include "tandem/error.h"
#include "tandem/random.h"
#include "tune/measure.h"

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;

/// `layers` of the model between embedding and head, which are not part of a step.
ModelConfig layers_of(const TrainBench& q) {
  ModelConfig config = published_config("bench train", q.model, q.layers);
  config.vocab = 8 * q.tp;
  config.max_seq = q.seq;
  config.sliding_window = q.window;
  config.tie_word_embeddings = false;
  config.aux_loss_coeff = 0;
  return config;
}

/// Layers as on a tensor-parallel rank, for one rank.
ModelConfig shard_of_layers(ModelConfig config, int tp) {
  config.heads /= tp;
  config.kv_heads /= tp;
  config.ffn /= tp;
  return config;
}

/// `batch`: sequences of this rank.
TransformerOptions make_options(const RunConfig& train, int64_t batch, const ParallelGroups* groups,
                                Strategy strategy) {
  TransformerOptions options;
  options.batch = batch;
  options.seq = train.seq;
  options.dtype = train.activation_dtype();
  options.gradient_dtype = parse_dtype(train.gradient_dtype);
  options.residual_gradient = parse_dtype(train.residual_gradient);
  options.fp8 = train.is_fp8();
  options.fp8_weight_gradients = train.fp8_weight_gradients;
  options.overlap.strategy = strategy;
  options.deterministic = train.deterministic;
  options.recompute = {parse_recompute(train.recompute)};
  if (!groups || !groups->experts()) return options;
  options.experts = groups->experts();
  options.step = groups->world_axes();
  return options;
}

/// Position in its sequence at which each position's document begins. Lengths are exponential,
/// drawn alike on all ranks; none if `mean` is 0.
std::vector<int32_t> draw_documents(int64_t batch, int64_t seq, int64_t mean) {
  constexpr uint64_t kSeed = 3;
  std::vector<int32_t> starts(size_t(mean > 0 ? batch * seq : 0));
  uint64_t drawn = 0;
  int64_t begin = 0, end = 0;
  for (size_t i = 0; i < starts.size(); ++i) {
    const int64_t position = int64_t(i) % seq;
    if (position == 0 || position == end) {
      const double length = -std::log1p(-double(uniform(kSeed, 0, drawn++))) * double(mean);
      begin = position, end = position + std::max<int64_t>(1, std::llround(length));
    }
    starts[i] = int32_t(begin);
  }
  return starts;
}

/// A step on this rank, with the same input and gradient of the output each time.
class LayerStep {
 public:
  /// `stream`: of the random input.
  LayerStep(Communicator& tp, const ModelConfig& config, const TransformerOptions& options,
            uint64_t stream, int64_t documents)
      : stream_(stream),
        exec_(make_exec(tp)),
        stage_(tp, config, options, {.embedding = false, .head = false}),
        microbatch_(stage_.make_microbatch()),
        gradient_(stage_.residual_gradient().bytes(), exec_.device) {
    stage_.initialize(1);
    stage_.end_staging();
    if (const auto starts = draw_documents(options.batch, options.seq, documents);
        !starts.empty()) {
      stage_.set_documents(starts, microbatch_);
    }
    const Shard rows = shard_of(options.batch * options.seq, tp.size(), tp.rank());
    fill(stage_.input(microbatch_), rows.begin, 1);
    fill(gradient(), rows.begin, 2);
  }

  void enqueue() {
    stage_.begin_step();
    copy(exec_, gradient(), stage_.residual_gradient());
    stage_.enqueue_forward({}, {}, microbatch_);
    stage_.backward(microbatch_, 1);
  }
  void run() {
    enqueue();
    wait(exec_);
  }

  /// Hash of the output and all gradients.
  uint64_t digest() {
    uint64_t digest = 0;
    for (const Tensor& each :
         {stage_.output(microbatch_), stage_.residual_gradient(), stage_.gradients()}) {
      const std::vector<float> values = read_f32(exec_, each);
      digest = XXH3_64bits_withSeed(values.data(), values.size() * sizeof(float), digest);
    }
    return digest;
  }
  size_t activation_bytes() const { return microbatch_.bytes() + stage_.shared_activation_bytes(); }
  const Stage& stage() const { return stage_; }
  const Exec& exec() const { return exec_; }

 private:
  /// The output's, in the dtype of the residual stream's.
  Tensor gradient() {
    const Tensor dx = stage_.residual_gradient();
    return gradient_.view(dx.dtype(), {dx.dim(0), dx.dim(1)});
  }
  /// Uniform in [-1, 1): the same for a row of the whole on any rank.
  void fill(const Tensor& rows, int64_t first, uint64_t seed) const {
    std::vector<float> values(size_t(rows.elements()));
    const auto begin = uint64_t(first * rows.dim(1));
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = uniform(seed, stream_, begin + i) * 2 - 1;
    }
    const Tensor in_f32 = Tensor::of(std::span(values), {rows.dim(0), rows.dim(1)});
    if (rows.dtype() == DType::f32) return copy(exec_, in_f32, rows);
    const Memory memory(rows.bytes());
    const Tensor rounded = memory.view(rows.dtype(), {rows.dim(0), rows.dim(1)});
    cast({}, in_f32, rounded);
    copy(exec_, rounded, rows);
  }

  uint64_t stream_;
  Exec exec_;
  Stage stage_;
  Microbatch microbatch_;
  Memory gradient_;
};

/// Gradients of all parameters on one CPU rank.
struct WholeGradients {
  std::vector<Parameter> parameters;
  std::vector<float> values;
};

WholeGradients gradients_on_cpu(const ModelConfig& config, TransformerOptions options,
                                int64_t documents) {
  if (options.dtype == DType::f32) options.gradient_dtype = options.residual_gradient = DType::f32;
  options.experts = nullptr;
  options.step = {};
  WholeGradients whole;
  run_threads({.ranks = 1}, [&](Communicator& one) {
    LayerStep step(one, config, options, 0, documents);
    step.run();
    whole.values = read_f32(step.exec(), step.stage().gradients());
    whole.parameters = step.stage().parameter_list();
  });
  return whole;
}

/// |found / times - exact| and |exact| over the elements of `shard`, a rank's of `found`.
std::pair<double, double> difference(std::span<const float> found, const Parameter& shard,
                                     std::span<const float> exact, const Parameter& whole,
                                     double times) {
  double error = 0, size = 0;
  const LocalShard from = local_shard(shard), all = local_shard(whole);
  for (int64_t i = 0; i < from.rows; ++i) {
    for (int64_t j = 0; j < from.columns; ++j) {
      const int64_t at = from.first + i * from.whole_columns + j;
      const int64_t row = at / all.columns, column = at % all.columns;
      const double value = exact[size_t(whole.offset + row * all.row_stride + column)];
      const double got = found[size_t(shard.offset + i * from.row_stride + j)];
      error += (got / times - value) * (got / times - value);
      size += value * value;
    }
  }
  return {std::sqrt(error), std::sqrt(size)};
}

/// Operations of the layers for a sequence.
double flops_of_layers(const ModelConfig& model, int64_t length) {
  ModelConfig without_layers = model;
  without_layers.layers = 0;
  return (model.flops_per_token(length) - without_layers.flops_per_token(length)) * double(length);
}

/// Gradients in `f32` and in the dtype of `options`, on a CPU rank. `reports`: notes what is
/// computed before it begins, as weights of large layers take minutes.
std::pair<WholeGradients, WholeGradients> references(const ModelConfig& model,
                                                     const TransformerOptions& options,
                                                     int64_t documents, bool reports) {
  TransformerOptions in_f32 = options;
  in_f32.dtype = DType::f32;
  in_f32.fp8 = false;
  const bool rounds = options.dtype != DType::f32;
  const std::string_view dtype = options.fp8 ? "fp8" : name_of(options.dtype);
  if (reports) {
    note(
        fmt::format("bench train: computing gradients of one layer and {} tokens on a CPU rank, in "
                    "f32{}: {} parameters, {:.2g} TFLOP{}",
                    options.seq, rounds ? fmt::format(" and {}", dtype) : "",
                    format_count(double(model.parameters())),
                    flops_of_layers(model, options.seq) * 1e-12, rounds ? " each" : ""));
  }
  const Clock::time_point begin = Clock::now();
  WholeGradients exact = gradients_on_cpu(model, in_f32, documents);
  if (!rounds) return {exact, std::move(exact)};
  if (reports) {
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    note(fmt::format("bench train: f32 took {:.1f} s, {} takes about as long", seconds, dtype));
  }
  WholeGradients rounded = gradients_on_cpu(model, options, documents);
  return {std::move(exact), std::move(rounded)};
}

/// Compares one layer on a few tokens with CPU ranks, with a window shorter than these. All EP
/// ranks have the same tokens, so that an expert's gradient is as many times that of one rank.
void check_gradients(const ParallelGroups& groups, ModelConfig model, RunConfig train,
                     int64_t documents, bool reports, TrainBenchResult& result) {
  model.layers = 1;
  train.seq = std::min<int64_t>(64, train.seq);
  model.sliding_window = std::min(model.sliding_window, train.seq / 3);
  documents = std::min(documents, train.seq / 4);
  TransformerOptions options = make_options(train, 1, &groups, Strategy::automatic);
  options.documents = documents > 0;
  const auto [exact, rounded] = references(model, options, documents, reports);
  LayerStep step(groups.tp(), model, options, 0, documents);
  step.run();
  const std::vector<float> found = read_f32(step.exec(), step.stage().gradients());
  const std::vector<Parameter>& shards = step.stage().parameter_list();
  for (size_t i = 0; i < shards.size(); ++i) {
    if (shards[i].sharding.absent) continue;
    const double times = shards[i].sharding.over_ep() ? double(groups.dims().ep()) : 1;
    const auto [error, size] =
        difference(found, shards[i], exact.values, exact.parameters[i], times);
    if (size == 0 && error == 0) continue;  // without a gradient, or on another rank
    const double of_cpu =
        difference(rounded.values, exact.parameters[i], exact.values, exact.parameters[i], 1)
            .first /
        size;
    const double bound = 1.5 * of_cpu + 2e-5 + (model.experts > 0 ? 0.1 : 0);
    const double ratio = std::isfinite(error) ? error / size / bound : HUGE_VAL;
    if (ratio <= result.of_bound) continue;
    result.of_bound = ratio;
    result.worst = shards[i].name;
  }
}

/// Largest over the ranks, with its rank's name.
void agree(Communicator& world, TrainBenchResult& result) {
  struct Local {
    double of_bound;
    int64_t memory;
    bool equal;
    char worst[128];
  };
  Local local{result.of_bound, result.memory_bytes, result.bitwise_equal_runs, {}};
  result.worst.copy(local.worst, sizeof local.worst - 1);
  for (const auto& blob : world.exchange(std::as_bytes(std::span(&local, 1)), "bench")) {
    Local other;
    std::memcpy(&other, blob.data(), sizeof other);
    result.memory_bytes = std::max(result.memory_bytes, other.memory);
    result.bitwise_equal_runs = result.bitwise_equal_runs && other.equal;
    if (other.of_bound <= result.of_bound) continue;
    result.of_bound = other.of_bound;
    result.worst = other.worst;
  }
}

constexpr double kIdleGap = 1.5;  // of a step: the power limit lowers the clock of a busy GPU

/// A step from the moment all ranks have arrived, on GPUs after an idle gap.
TimedRun timed_step(Communicator& world, LayerStep& step) {
  return
      [run = timed(world, [&step] { step.run(); }), on_gpu = world.on_gpu(), last = 0.0]() mutable {
        if (on_gpu) std::this_thread::sleep_for(std::chrono::duration<double>(kIdleGap * last));
        return last = run();
      };
}

std::vector<double> sustained(Communicator& world, LayerStep& step, int repeats) {
  const TimedRun all = timed(world, [&] {
    for (int i = 0; i < repeats; ++i) step.enqueue();
    wait(step.exec());
  });
  const std::vector<TimedRun> variants{all};
  std::vector<double> seconds =
      measure(world, variants, {.min_rounds = 2, .max_rounds = 2, .seconds = 0})[0];
  for (double& each : seconds) each /= repeats;
  return seconds;
}

/// Operations of the layers, for the sequences of a tensor-parallel group.
double flops_of_step(const ModelConfig& model, const TrainBench& q) {
  const std::vector<int32_t> starts = draw_documents(q.batch, q.seq, q.documents);
  if (starts.empty()) return double(q.batch) * flops_of_layers(model, q.seq);
  double all = 0;
  for (size_t i = 0; i < starts.size(); ++i) {
    const int64_t position = int64_t(i) % q.seq;
    const bool is_last = position + 1 == q.seq || starts[i + 1] != starts[i];
    if (is_last) all += flops_of_layers(model, position + 1 - starts[i]);
  }
  return all;
}

}  // namespace

TrainConfig train_bench_config(const TrainBench& q, bool on_gpus, bool ranks_share_gpu) {
  TrainConfig config;
  config.model = layers_of(q);
  config.train.steps = 1;
  config.train.batch = q.batch * q.ep;
  config.train.seq = q.seq;
  config.train.dtype = q.dtype;
  config.train.gradient_dtype = q.gradient_dtype;
  config.train.residual_gradient = q.residual_gradient;
  config.train.fp8_weight_gradients = q.tp == 1;  // also where a rank's shards run alone
  config.train.deterministic = q.deterministic;
  config.train.recompute = q.recompute;
  config.parallel.tp = q.tp;
  config.parallel.dp = config.parallel.ep = q.ep;
  config.data.paths = {"-"};  // none is read
  config.data.document_mask = q.documents > 0;
  if (q.ep > 1 && config.model.experts == 0) {
    throw InvalidArgument(fmt::format("bench train: --ep {}: {} has no experts", q.ep, q.model));
  }
  for (const auto& [option, dtype] : {std::pair("gradient-dtype", q.gradient_dtype),
                                      std::pair("residual-gradient", q.residual_gradient)}) {
    if (dtype == "f32" || (q.dtype == "bf16" && config.model.experts == 0)) continue;
    throw InvalidArgument(
        fmt::format("bench train: --{} {} with --dtype {} of {}: expected f32, or bf16 of a model "
                    "without experts",
                    option, dtype, q.dtype, q.model));
  }
  if (q.dtype == "fp8" && q.seq % kFp8Unit != 0) {
    throw InvalidArgument(fmt::format(
        "bench train: --seq {} with --dtype fp8: expected a multiple of {}", q.seq, kFp8Unit));
  }
  config.model.check_training(q.tp, q.ep);
  if (on_gpus) check_gpu_training(config, ranks_share_gpu);
  MemoryEstimate(config, on_gpus).check();
  return config;
}

TrainBenchResult run_train_bench(Communicator& world, const TrainBench& q) {
  const TrainConfig config = train_bench_config(q, world.on_gpu(), world.transport() == "one_gpu");
  const ParallelGroups groups(world, ParallelDims(config.parallel), config.model.experts > 0);
  TrainBenchResult result;
  result.deterministic = q.deterministic;
  check_gradients(groups, config.model, config.train, q.documents, world.rank() == 0, result);

  const auto tokens = uint64_t(groups.copies().rank());  // each EP rank has its own
  const auto options_of = [&](const ParallelGroups* of, Strategy strategy) {
    TransformerOptions options = make_options(config.train, q.batch, of, strategy);
    options.documents = q.documents > 0;
    return options;
  };
  std::optional<uint64_t> saved;
  if (q.recompute != "none") {
    TransformerOptions options = options_of(&groups, Strategy::automatic);
    options.recompute = {};
    LayerStep step(groups.tp(), config.model, options, tokens, q.documents);
    step.run();
    saved = step.digest();
  }
  clear_receipts();
  LayerStep step(groups.tp(), config.model, options_of(&groups, Strategy::automatic), tokens,
                 q.documents);
  step.run();
  const uint64_t digest = step.digest();
  step.run();
  result.bitwise_equal_runs = step.digest() == digest && saved.value_or(digest) == digest;
  result.memory_bytes = memory_in_use(step.exec());
  result.activation_bytes = step.activation_bytes();
  result.receipts = receipts();

  std::vector<TimedRun> variants{timed_step(world, step)};
  const bool compares = q.tp > 1 && config.model.experts == 0;
  std::unique_ptr<Communicator> one;
  std::unique_ptr<LayerStep> serial, alone;
  if (compares) {
    serial = std::make_unique<LayerStep>(
        groups.tp(), config.model, options_of(&groups, Strategy::serial), tokens, q.documents);
    one = world.split(world.rank(), 0);
    alone =
        std::make_unique<LayerStep>(*one, shard_of_layers(config.model, q.tp),
                                    options_of(nullptr, Strategy::automatic), tokens, q.documents);
    variants.push_back(timed_step(world, *serial));
    variants.push_back(timed_step(world, *alone));
  }
  const auto seconds = measure(
      world, variants, {.min_rounds = q.repeats, .max_rounds = q.repeats, .seconds = HUGE_VAL});
  result.step = times_of(seconds[0]);
  if (compares) {
    result.serial = times_of(seconds[1]);
    result.alone = times_of(seconds[2]);
  }
  result.sustained = times_of(sustained(world, step, q.repeats));

  result.flops = double(q.ep) * flops_of_step(config.model, q);
  result.peak_flops = measure_utilization(world, config).peak_flops;
  agree(world, result);
  return result;
}

}  // namespace tandem
