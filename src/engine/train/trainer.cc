#include "engine/train/trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>
#include <utility>

#include "core/files.h"
#include "core/machine.h"
#include "engine/checkpoint/made_by.h"
#include "engine/checkpoint/run_lock.h"
#include "engine/checkpoint/same_run.h"
#include "engine/checkpoint/saving.h"
#include "engine/data/sampler.h"
#include "engine/eval/validation.h"
#include "engine/model/expert_load.h"
#include "engine/model/transformer.h"
#include "engine/parallel/agreement.h"
#include "engine/parallel/collective_check.h"
#include "engine/plan/auto_dtype.h"
#include "engine/plan/utilization.h"
#include "engine/report/progress.h"
#include "engine/train/gpu_training.h"
#include "engine/train/metrics.h"
#include "engine/train/step_exchange.h"
#include "engine/train/trace_steps.h"
#include "gemm/gemm.h"
#include "observe/recorder.h"
#include "tandem/error.h"

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;
using Lines = std::vector<std::string>;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

Strategy strategy_of(const std::string& name) {
  for (const Strategy s : {Strategy::automatic, Strategy::serial, Strategy::overlapped}) {
    if (name == name_of(s)) return s;
  }
  throw ConfigError(fmt::format("parallel.strategy is \"{}\"", name));
}

TransformerOptions options_of(const TrainConfig& config) {
  TransformerOptions options;
  options.batch = config.train.microbatch > 0 ? config.train.microbatch
                                              : config.train.batch / config.parallel.dp;
  options.seq = config.train.seq;
  options.dtype = parse_dtype(config.train.dtype);
  options.overlap = {strategy_of(config.parallel.strategy), int(config.parallel.chunks)};
  options.codec = CodecPolicy::parse(config.parallel.codec);
  return options;
}

const TrainRequest& checked(Communicator& world, const TrainRequest& request,
                            const Corpus& corpus) {
  const auto& parallel = request.config.parallel;
  if (parallel.tp * parallel.dp != world.size()) {
    throw InvalidArgument(fmt::format("world of {} ranks: expected tp x dp = {} x {} = {}",
                                      world.size(), parallel.tp, parallel.dp,
                                      parallel.tp * parallel.dp));
  }
  if (world.on_gpu()) check_gpu_training(request.config);
  world.require_same("configuration", to_toml(request.config));
  world.require_same("--resume", request.resume ? "yes" : "no");
  world.require_same("--out", request.out);
  require_same_place(world, "--out", request.out);
  world.require_same("the training text",
                     fmt::format("{} files, {} bytes, hash {}", corpus.files().size(),
                                 corpus.bytes(), corpus.fingerprint()));
  set_kernel_threads(threads_per_rank(world.size()));
  return request;
}

class Trainer {
 public:
  Trainer(Communicator& world, const TrainRequest& request, const Corpus& corpus)
      : world_(world),
        request_(checked(world, request, corpus)),
        config_(request.config),
        corpus_(corpus),
        sampler_(corpus, config_.train.seq, uint64_t(config_.train.seed)),
        tp_(world.split(world.rank() / int(config_.parallel.tp),
                        world.rank() % int(config_.parallel.tp))),
        dp_(world.split(world.rank() % int(config_.parallel.tp),
                        world.rank() / int(config_.parallel.tp))) {
    split_for_experts();
    if (world.rank() == 0) progress_.emplace(request.log);
    const std::string resume_from = on_rank_zero(
        world, "opening the output", [&] { return open_output(); },
        uint64_t(12 * config_.model.parameters()));
    resolve_dtype(resume_from);
    options_ = options_of(config_);
    options_.experts = experts_.get();
    options_.step = experts_ ? &world : nullptr;
    if (request.routed) options_.routed = std::bind_front(request.routed, world.rank());
    model_.emplace(*tp_, config_.model, options_);
    make_optimizers();
    tokens_.resize(size_t(options_.batch * options_.seq));
    targets_.resize(tokens_.size());
    if (resume_from.empty()) {
      model_->initialize(uint64_t(config_.train.seed));
      optimizer_->adopt_parameters();
      if (expert_optimizer_) expert_optimizer_->adopt_parameters();
      state_.seq = config_.train.seq;
      state_.seed = config_.train.seed;
      state_.data = corpus.fingerprint();
    } else {
      world.require_same("the checkpoint to resume from",
                         content_hash(read_file(resume_from + "/state.json")));
      const std::string change = load_checkpoint(ranks(), resume_from);
      if (progress_ && !change.empty()) progress_->note(change);
      state_ = read_train_state(resume_from);
    }
    state_.config = to_toml(config_);
    state_.made_by = build_identity();
    if (config_.train.validate_every > 0) {
      validation_.emplace(world_, *tp_, *dp_, experts_.get(), config_.model, corpus,
                          config_.train.validate_bytes);
      if (progress_) progress_->note(validation_->describe());
    }
    utilization_ = measure_utilization(world, config_);
    if (world.rank() != 0) return;
    for (const auto& line : utilization_.describe(config_)) progress_->note(line);
    progress_->note(describe_state(*optimizer_, expert_optimizer_ ? &*expert_optimizer_ : nullptr));
    log_.emplace(request_.out + "/metrics.jsonl", state_.step);
    keeper_.emplace(request_.out, config_.checkpoint.keep,
                    [&](const std::string& text) { progress_->note("warning: " + text); });
  }

  TrainEnd run() {
    TraceSteps trace(world_, config_, state_.step);
    run_start_ = Clock::now();
    elapsed_before_ = state_.elapsed_s;
    while (!finished() && !stop_ && !failed_ && diverged_.empty()) {
      if (request_.before_step) request_.before_step(state_.step);
      trace.before_step(state_.step);
      step();
      trace.after_step(state_.step, request_.out);
      end_step();
      const bool due = config_.checkpoint.every > 0 && state_.step % config_.checkpoint.every == 0;
      if (due || std::exchange(save_asked_, false)) save();
    }
    save();
    trace.finish(request_.out);
    throw_what_ended_it();
    const bool stopped = !finished();
    if (!stopped) save_final(ranks(), request_.out, state_, config_.model);
    if (progress_) progress_->finish();
    return {stopped, state_.step, loss_, checkpoint_path(request_.out, state_.step)};
  }

 private:
  TrainedRanks ranks() {
    const auto& parallel = config_.parallel;
    return {world_,
            fmt::format("tp {} dp {} ep {} with buckets of {} MiB", parallel.tp, parallel.dp,
                        parallel.ep, parallel.dp_bucket_mib),
            *tp_,
            *model_,
            *optimizer_,
            expert_optimizer_ ? &*expert_optimizer_ : nullptr};
  }

  /// Experts are sharded inside data parallel, over ep consecutive replicas.
  void split_for_experts() {
    if (config_.model.experts == 0) return;
    const int group = int(config_.parallel.tp * config_.parallel.ep);
    experts_ = world_.split(world_.rank() / group, world_.rank() % group);
    expert_dp_ = world_.split(world_.rank() % group, world_.rank() / group);
  }

  /// Creates one optimizer for the replicated parameters and one for the experts of this EP rank.
  void make_optimizers() {
    const auto bucket = int64_t(config_.parallel.dp_bucket_mib * (1 << 20) / sizeof(float));
    const DataParallelWires wires{options_.codec.gradients, options_.codec.weights,
                                  config_.parallel.error_feedback};
    const auto begin = size_t(model_->experts_begin());
    std::vector<Parameter> dense, experts;
    for (Parameter p : model_->parameter_list()) {
      const bool is_expert = p.sharding.over_ep();
      if (is_expert) p.offset -= int64_t(begin);
      (is_expert ? experts : dense).push_back(p);
    }
    const auto values = model_->parameters(), gradients = model_->gradients();
    optimizer_.emplace(*dp_, values.first(begin), gradients.first(begin), dense, bucket, wires);
    if (!expert_dp_) return;
    expert_optimizer_.emplace(*expert_dp_, values.subspan(begin), gradients.subspan(begin), experts,
                              bucket, wires);
  }

  void ready(int64_t begin) {
    const int64_t experts = model_->experts_begin();
    begin >= experts ? expert_optimizer_->ready(begin - experts) : optimizer_->ready(begin);
  }

  /// The auxiliary loss covers a step's tokens: if they need several forward passes, separate
  /// passes count the experts first.
  void count_experts(int64_t share) {
    model_->begin_step();
    if (config_.model.experts == 0 || config_.model.aux_loss_coeff == 0 || share == options_.batch)
      return;
    for (int64_t at = 0; at < share; at += options_.batch) {
      read_microbatch(state_.next_sample + dp_->rank() * share + at);
      model_->forward(tokens_, targets_);
    }
    model_->share_load();
  }

  void report_experts(StepMetrics& metrics) const {
    const ExpertLoad* load = model_->load();
    if (!load) return;
    double loss = 0;
    for (int layer = 0; layer < int(load->layers()); ++layer) {
      loss += load->aux_loss(layer, config_.model.aux_loss_coeff, config_.model.top_k);
      metrics.imbalance.push_back(load->imbalance(layer, int(config_.parallel.ep)));
      metrics.expert_imbalance.push_back(load->imbalance(layer, int(config_.model.experts)));
      const auto counts = load->counts(layer);
      metrics.expert_rows.emplace_back(counts.begin(), counts.end());
    }
    if (config_.model.aux_loss_coeff > 0) metrics.aux_loss = loss;
  }

  /// Runs on rank 0. Returns the checkpoint to resume from, or an empty string.
  std::string open_output() {
    const std::string& out = request_.out;
    make_directories(out);
    lock_.emplace(out);
    if (!request_.resume) require_no_run(out);
    std::string path;
    if (request_.resume) {
      const auto found = newest_checkpoint(
          out, [&](const std::string& text) { progress_->note("warning: " + text); });
      if (found) {
        path = found->path, require_same_run(*found, config_, corpus_.fingerprint());
        const std::string change = describe_change(found->state.made_by, build_identity());
        if (!change.empty()) progress_->note("warning: " + change);
      }
      progress_->note(found ? fmt::format("resuming from {}", path)
                            : fmt::format("{} holds no checkpoint: starting at step 0", out));
      for (const std::string& line : found ? describe_resume(found->state, config_) : Lines()) {
        progress_->note(line);
      }
    }
    for (const std::string& change : corpus_.notes()) progress_->note("data.paths: " + change);
    progress_->note(fmt::format(
        "{:.2f} M parameters; {} files, {} of text, {} files held out; {} windows of {}",
        double(config_.model.parameters()) / 1e6, corpus_.files().size(),
        format_bytes(double(corpus_.bytes())), corpus_.heldout_files().size(), sampler_.windows(),
        config_.train.seq));
    return path;
  }

  /// Resolves dtype "auto", in a resumed run to the dtype of its start, and writes the effective
  /// settings to OUT/config.toml.
  void resolve_dtype(const std::string& resume_from) {
    std::string text;
    if (config_.train.dtype == "auto" && !resume_from.empty()) {
      config_.train.dtype =
          parse_config(read_train_state(resume_from).config, resume_from + "/state.json")
              .train.dtype;
      text = fmt::format("train.dtype auto: {}, as this run began", config_.train.dtype);
    } else if (config_.train.dtype == "auto") {
      const DTypeChoice choice = choose_dtype(world_, config_);
      config_.train.dtype = name_of(choice.dtype);
      text = choice.describe();
    }
    if (progress_ && !text.empty()) progress_->note(text);
    on_rank_zero(world_, "writing the configuration", [&] {
      write_configuration();
      return std::string();
    });
  }

  bool finished() const {
    return config_.train.seconds > 0 ? state_.elapsed_s >= config_.train.seconds
                                     : state_.step >= config_.train.steps;
  }

  void step() {
    const auto start = Clock::now();
    recorder().reset();
    const auto& train = config_.train;
    const int64_t share = train.batch / config_.parallel.dp;
    verify_text_of_epoch();
    int64_t targets = 0;
    for (int64_t i = 0; i < train.batch; ++i)
      targets += sampler_.targets_of(state_.next_sample + i);
    StepSums sums;
    count_experts(share);
    for (int64_t at = 0; at < share; at += options_.batch) {
      read_microbatch(state_.next_sample + dp_->rank() * share + at);
      sums.loss += model_->forward(tokens_, targets_);
      const bool last = at + options_.batch >= share;
      model_->backward(1.0f / float(targets), last ? std::bind_front(&Trainer::ready, this)
                                                   : std::function<void(int64_t)>());
    }
    model_->share_load();
    const auto squares = optimizer_->reduce();
    sums.squares = squares.sharded + (tp_->rank() == 0 ? squares.replicated : 0);
    if (expert_optimizer_) sums.squares += expert_optimizer_->reduce().sharded;
    sums.loss = tp_->rank() == 0 ? sums.loss : 0;
    sums.elapsed_s = elapsed_before_ + seconds_since(run_start_);
    sums.stop = request_.stop && *request_.stop;
    const int asked = request_.saves ? request_.saves->load() : 0;
    sums.save = asked != saves_seen_;
    saves_seen_ = asked;
    sums.failed = !failure_.empty();
    sums = exchange_sums(world_, sums);
    save_asked_ = save_asked_ || sums.save;
    failed_ = sums.failed;
    if (failed_) return;  // nothing has changed yet: the run ends after the previous step

    StepMetrics metrics;
    metrics.loss = sums.loss / double(targets);
    metrics.grad_norm = std::sqrt(sums.squares);
    if (!std::isfinite(metrics.loss) || !std::isfinite(metrics.grad_norm)) {
      diverged_ = fmt::format(
          "step {}: loss is {}, gradient norm {}: expected finite numbers (lower optimizer.lr = "
          "{})",
          state_.step + 1, metrics.loss, metrics.grad_norm, config_.optimizer.lr);
      return;
    }
    if (state_.step == config_.optimizer.warmup) state_.warmup_s = sums.elapsed_s;
    metrics.lr = learning_rate(config_, state_.step, sums.elapsed_s, state_.warmup_s);
    const AdamStep adam = AdamStep::make(config_, state_.step, metrics.lr, metrics.grad_norm);
    optimizer_->update(adam);
    if (expert_optimizer_) expert_optimizer_->update(adam);
    if (config_.model.router_bias_update_rate > 0) model_->adjust_router_bias();
    model_->parameters_changed();

    state_.next_sample += train.batch;
    state_.elapsed_s = sums.elapsed_s;
    stop_ = sums.stop;
    loss_ = metrics.loss;
    metrics.step = ++state_.step;
    metrics.tokens = targets;
    report_experts(metrics);
    auto sent = optimizer_->take_sent();
    if (expert_optimizer_) sent += expert_optimizer_->take_sent();
    exchange_step(world_, sent, metrics);
    const double seconds = seconds_since(start);
    metrics.step_ms = seconds * 1e3;
    metrics.tokens_per_s = double(targets) / seconds;
    metrics.mfu = utilization_.of(metrics.tokens_per_s);
    done_ = metrics;
  }

  /// Untimed and untraced work after a step: validation and reporting.
  void end_step() {
    if (!done_) return;
    StepMetrics metrics = *std::exchange(done_, std::nullopt);
    if (validation_ && metrics.step % config_.train.validate_every == 0) {
      const auto begin = Clock::now();
      metrics.validation_loss = validation_->loss(metrics.step, model_->parameters(), request_.stop,
                                                  progress_ ? &*progress_ : nullptr);
      run_start_ += Clock::now() - begin;  // excluded from training time
    }
    if (world_.rank() == 0) report(metrics);
  }

  void read_microbatch(int64_t sample) {
    const ScopedSpan span(SpanKind::data, "read");
    const auto seq = size_t(options_.seq);
    try {
      for (size_t i = 0; i < size_t(options_.batch); ++i) {
        sampler_.read(sample + int64_t(i), std::span(tokens_).subspan(i * seq, seq),
                      std::span(targets_).subspan(i * seq, seq));
      }
    } catch (const IoError& error) {
      no_text(error);
    }
  }

  /// Verifies the text once per epoch: file times are not enough, as writes through a mapping show
  /// late.
  void verify_text_of_epoch() {
    if (state_.next_sample == 0 ||
        sampler_.epoch_of(state_.next_sample) ==
            sampler_.epoch_of(state_.next_sample - config_.train.batch)) {
      return;
    }
    try {
      corpus_.verify(&world_);
    } catch (const IoError& error) {
      no_text(error);
    }
  }

  /// Other ranks wait for this one's contribution to the step, so it continues with ignored text.
  void no_text(const IoError& error) {
    failure_ = error.what();
    std::fill(tokens_.begin(), tokens_.end(), kBos);
    std::fill(targets_.begin(), targets_.end(), -1);
  }

  /// Called after the last save.
  void throw_what_ended_it() {
    const std::string saved = fmt::format("; ended after step {}, saved {}", state_.step,
                                          checkpoint_path(request_.out, state_.step));
    for (const std::string& failure :
         on_every_rank(world_, "the end of the run", 0, [&] { return failure_; })) {
      if (!failure.empty()) throw IoError(failure + saved);
    }
    if (!diverged_.empty()) throw ConfigError(diverged_ + saved);
  }

  void report(const StepMetrics& metrics) {
    try {
      log_->append(metrics);
    } catch (const IoError& error) {
      failure_ = error.what();  // ends the run in the next step, which is dropped
    }
    if (!std::exchange(said_what_is_sent_, true)) {
      for (const std::string& line :
           describe_sent(options_.codec, config_.parallel.error_feedback, metrics)) {
        progress_->note(line);
      }
    }
    const bool timed = config_.train.seconds > 0;
    progress_->update({.step = metrics.step,
                       .steps = timed ? 0 : config_.train.steps,
                       .loss = metrics.loss,
                       .tokens_per_s = metrics.tokens_per_s,
                       .elapsed_s = state_.elapsed_s,
                       .seconds = config_.train.seconds,
                       .lr = metrics.lr,
                       .grad_norm = metrics.grad_norm,
                       .mfu = metrics.mfu});
  }

  /// No-op if this run has saved the step.
  void save() {
    if (saved_ == state_.step) return;
    const ScopedSpan span(SpanKind::checkpoint, "checkpoint");
    on_rank_zero(world_, "the folder of the run", [&] {
      if (lock_->renew()) {
        write_configuration();
        log_.emplace(request_.out + "/metrics.jsonl", state_.step);
      }
      try {
        log_->sync();
      } catch (const IoError& error) {
        failure_ = error.what();  // concerns no step of this checkpoint
      }
      return std::string();
    });
    save_checkpoint(ranks(), request_.out, state_, config_.model, keeper_ ? &*keeper_ : nullptr);
    saved_ = state_.step;
  }

  void write_configuration() {
    replace_file(request_.out + "/heldout.txt", list_of_paths(corpus_.heldout_files()));
    replace_file(request_.out + "/config.toml", to_toml(config_));
  }

  Communicator& world_;
  const TrainRequest& request_;
  TrainConfig config_;  // with its dtype resolved
  const Corpus& corpus_;
  std::optional<RunLock> lock_;  // rank 0
  Sampler sampler_;
  std::unique_ptr<Communicator> tp_, dp_;
  std::unique_ptr<Communicator> experts_, expert_dp_;  // MoE only
  TransformerOptions options_;
  std::optional<ProgressLine> progress_;    // rank 0
  std::optional<MetricsLog> log_;           // rank 0
  std::optional<CheckpointKeeper> keeper_;  // rank 0
  std::optional<Transformer> model_;
  std::optional<DataParallel> optimizer_, expert_optimizer_;
  std::optional<Validation> validation_;
  Utilization utilization_;
  std::optional<StepMetrics> done_;  // finished step, not reported yet
  TrainState state_;
  Clock::time_point run_start_;
  double elapsed_before_ = 0;
  double loss_ = NAN;
  int64_t saved_ = -1;  // step of the last checkpoint
  int saves_seen_ = 0;
  bool stop_ = false, failed_ = false, save_asked_ = false, said_what_is_sent_ = false;
  std::string failure_;   // this rank's: the run ends after the previous step, which is saved
  std::string diverged_;  // message if the loss is not finite; the same on all ranks
  std::vector<int32_t> tokens_, targets_;
};

}  // namespace

TrainEnd train(Communicator& world, const TrainRequest& request, const Corpus& corpus) {
  return Trainer(world, request, corpus).run();
}

}  // namespace tandem
