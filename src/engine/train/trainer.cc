#include "engine/train/trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>
#include <utility>

#include "core/clock.h"
#include "engine/checkpoint/loading.h"
#include "engine/checkpoint/made_by.h"
#include "engine/checkpoint/run_checkpoints.h"
#include "engine/checkpoint/run_end.h"
#include "engine/checkpoint/saving.h"
#include "engine/data/sampler.h"
#include "engine/eval/validation.h"
#include "engine/parallel/collective_check.h"
#include "engine/plan/memory.h"
#include "engine/plan/utilization.h"
#include "engine/report/progress.h"
#include "engine/train/fault_injector.h"
#include "engine/train/model_ranks.h"
#include "engine/train/phase_log.h"
#include "engine/train/progress_sink.h"
#include "engine/train/resume_point.h"
#include "engine/train/run_files.h"
#include "engine/train/run_start.h"
#include "engine/train/self_check.h"
#include "engine/train/state_checks.h"
#include "engine/train/step_exchange.h"
#include "engine/train/step_executor.h"
#include "engine/train/step_guard.h"
#include "engine/train/trace_steps.h"
#include "observe/file_activity.h"
#include "observe/recorder.h"
#include "tandem/error.h"

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;

class Trainer {
 public:
  Trainer(Communicator& world, const TrainRequest& request, const TokenSource& source)
      : world_(world),
        request_(check_request(world, request, source)),
        config_(request.config),
        source_(source),
        sampler_(source, config_.train.seq, uint64_t(config_.train.seed),
                 make_sampler_options(config_)),
        groups_(world, ParallelDims(config_), config_.model.experts > 0) {
    config_.data.format = source.format();
    config_.parallel.replicas = groups_.dims().replicas();
    if (world.rank() == 0) progress_.emplace(request.log);
    if (!request.resume) find_init();
    memory_.emplace(world, snapshot_owner());
    ResumePoint begin_at;
    if (request.resume) {
      begin_at = find_resume_point(world, *memory_, files_ ? &*files_ : nullptr, config_);
      if (begin_at.is_start()) find_init();
    }
    note_lines(describe_run(config_, source_, sampler_));
    resolve_dtype(begin_at);
    note(describe_memory(config_, world.on_gpu()));
    ranks_.emplace(groups_, config_, request.routed);
    executor_.emplace(config_, groups_, source, sampler_, *ranks_);
    checks_.emplace(groups_, config_, *ranks_, request.out);
    if (!request.faults.empty()) injector_.emplace(request.faults, groups_, *ranks_, request.out);
    trained_.emplace(trained());
    begin(begin_at);
    executor_->load(state_.next_sample);  // under what precedes the first step
    if (config_.train.validate_every > 0) {
      validation_.emplace(groups_, config_, source);
      note(validation_->describe());
    }
    const bool knows_peak = request.rank_flops && *request.rank_flops > 0;
    utilization_ = measure_utilization(world, config_, request.rank_flops);
    if (!knows_peak) note_lines(utilization_.describe(config_));
    note(ranks_->describe_state());
    checkpoints_.emplace(*trained_, checkpoint_options(), state_);
    if (const size_t bytes = checkpoints_->snapshot_bytes(); bytes > 0) {
      note(fmt::format("checkpoints: {} of snapshots in the memory of this rank",
                       format_bytes(double(bytes))));
    }
    if (!knows_peak && SelfCheck::applies(config_, groups_, state_.step)) {
      self_check_.emplace(config_, groups_);
    }
    phase_log_.emplace(config_, request_.out + "/ranks", groups_, state_.step);
    on_output("room on disk",
              [&] { files_->check_room(config_, state_.step, begin_at.memory.has_value()); });
    if (!files_) return;
    files_->open_logs(ledger_start(state_, config_, sampler_));
    progress_sink_.emplace(config_, *progress_, state_);
  }

  TrainEnd run() {
    TraceSteps trace(world_, config_, state_.step, request_.out);
    run_start_ = Clock::now();
    elapsed_before_ = state_.elapsed_s;
    save_initial_model();
    stop_ = request_.only_saves;
    while (!finished() && !stop_ && !failed_ && diverged_.empty() && corrupt_.empty()) {
      const WorkScope scope("step", executor_->batch(state_.next_sample));
      if (request_.before_step) request_.before_step(state_.step);
      trace.before_step(state_.step);
      std::optional<StepRecord> record = step();
      if (!record) {
        trace.drop_step();
        continue;
      }
      trace.after_step(state_.step);
      end_step(*record);
      checkpoint();
      phase_log_->add(*record);
      if (self_check_) {
        const bool is_ours = files_ && files_->find_other_owner().empty();
        note_lines(self_check_->add(*record, phase_log_->phases(),
                                    is_ours ? request_.out + "/self_check.json" : ""));
      }
    }
    on_output("the folder of the run", [&] { files_->require_output(); });
    if (!corrupt_.empty()) end_corrupt();
    const bool saves = !request_.only_saves || memory_->restored() >= 0;
    const std::string unsaved = saves ? save_now() : "";
    const FileActivity ends("end");
    trace.finish();
    rethrow_error(unsaved);
    const bool stopped = request_.only_saves || !finished();
    if (!stopped && config_.train.early_stop > 0) note(describe_end(state_, config_));
    if (!unsaved.empty() && stopped) throw IoError(unsaved);
    if (!unsaved.empty()) note(fmt::format("warning: step {} not saved: {}", state_.step, unsaved));
    if (!stopped) {
      on_output("the folder of the run", [&] { files_->require_output(); });
      save_final(*trained_, LiveState(*trained_), request_.out, state_, config_.model,
                 parse_dtype(config_.checkpoint.export_dtype));
    }
    if (!unsaved.empty() && checkpoints_->saved_step() < 0) {
      throw IoError(fmt::format("{}/final is written, but no checkpoint could be saved: {}",
                                request_.out, unsaved));
    }
    if (progress_) progress_->finish();
    note_lines(describe_streams(source_));
    note(describe_peak(ranks_->chunks.front().stage.exec()));
    return {stopped, state_.step, loss_,
            saves && unsaved.empty() ? checkpoint_path(request_.out, state_.step) : ""};
  }

 private:
  TrainedRanks trained() {
    std::vector<TrainedStage> stages;
    for (ModelChunk& chunk : ranks_->chunks) stages.push_back({chunk.stage, chunk.optimizer});
    return {world_, describe_layout(groups_.dims(), config_, world_.on_gpu()), groups_.tp(),
            std::move(stages)};
  }

  void find_init() {
    init_from_ = find_initial_model(world_, request_.init, config_,
                                    [this](const std::string& text) { note(text); });
  }

  /// Shown on rank 0.
  void note(const std::string& text) {
    if (progress_) progress_->note(text);
  }

  void note_lines(const std::vector<std::string>& lines) {
    for (const std::string& line : lines) note(line);
  }

  /// Opens the files of the run.
  SnapshotOwner snapshot_owner() {
    const std::string run = on_rank_zero(world_, "opening the output", [&] {
      files_.emplace(request_.out, request_.resume, source_, *progress_,
                     request_.output_patience_s);
      if (request_.output_opened) request_.output_opened();
      return files_->run_id();
    });
    return {run, describe_layout(groups_.dims(), config_, world_.on_gpu()), world_.rank(),
            world_.size()};
  }

  /// Sets weights, optimizer and state: initial ones, or those of snapshots or of a checkpoint.
  void begin(const ResumePoint& from) {
    const auto state = restore(*trained_, *memory_, from, files_ ? &*files_ : nullptr, config_);
    if (state) {
      state_ = *state;
      seek_streams(world_, request_.out + "/ledger.jsonl", state_.next_sample, sampler_);
      if (state_.control.tokens < 0) {
        state_.control.tokens = count_targets(sampler_, state_.next_sample);
      }
    } else {
      if (!init_from_.empty()) {
        load_model(*trained_, init_from_);
      } else {
        for (ModelChunk& chunk : ranks_->chunks) {
          chunk.stage.initialize(uint64_t(config_.train.seed));
          chunk.optimizer.adopt_weights(chunk.stage.parameter_staging());
        }
      }
      state_.seq = config_.train.seq;
      state_.seed = config_.train.seed;
      state_.data = source_.fingerprint();
    }
    for (ModelChunk& chunk : ranks_->chunks) chunk.stage.end_staging();
    executor_->weights_changed();
    state_.config = to_toml(config_);
    state_.made_by = build_identity();
  }

  /// Resolves dtype "auto", in a resumed run to the dtype of its start, and writes the effective
  /// settings to OUT/config.toml.
  void resolve_dtype(const ResumePoint& from) {
    const std::string choice =
        choose_run_dtype(world_, config_, from.is_start() ? "" : from.state().config);
    if (!choice.empty()) note(choice);
    on_output("writing the configuration", [&] { files_->write_configuration(config_); });
  }

  /// Calls `work` on rank 0, whose files_ it uses. Collective.
  template <typename Work>
  void on_output(std::string_view what, const Work& work) {
    on_rank_zero(world_, what, [&] {
      work();
      return std::string();
    });
  }

  bool finished() const { return !describe_end(state_, config_).empty(); }

  /// Whether work of every `interval` steps is due after the last one; never if it is 0.
  bool is_due(int64_t interval) const { return interval > 0 && state_.step % interval == 0; }
  /// Whether validation follows the last step.
  bool validates() const {
    return validation_ && (is_due(config_.train.validate_every) || finished());
  }

  /// Returns nullopt for a step that is dropped: weights and optimizer have not changed. Its
  /// samples were consumed, or the run ends after the previous step.
  std::optional<StepRecord> step() {
    const auto start = Clock::now();
    recorder().reset();
    // Not before the ranks' times of the step before, which would arrive after the first weights.
    executor_->progress();
    executor_->verify_text(state_.next_sample);
    const int64_t targets = executor_->targets(state_.next_sample);
    if (files_ && error_.empty()) error_ = files_->find_other_owner();
    if (injector_) injector_->before_passes(state_.step + 1, *executor_);
    const auto compute = [&] { return executor_->compute(state_.next_sample, targets); };
    StepExecutor::Result result = compute();
    if (injector_) injector_->after_passes(state_.step + 1);
    checks_->compute_again(state_.step + 1, compute, result);
    const StepSums sums = exchange(result);
    report(checks_->find(sums.checks, state_.step + 1));
    if (!corrupt_.empty()) return {};
    save_requested_ = save_requested_ || sums.save;
    failed_ = sums.failed;
    if (!failed_ && !sums.text.agrees(groups_.dims().dp())) {
      error_ = fmt::format(
          "step {}: ranks of one replica have read different text: expected the same files on all "
          "machines",
          state_.step + 1);
      failed_ = true;
    }
    if (failed_) return {};

    StepRecord record;
    record.loss = sums.loss / double(std::max<int64_t>(1, targets));
    record.grad_norm = std::sqrt(sums.squares);
    const StepVerdict verdict = targets == 0 ? judge_empty_step(state_.step + 1, ++empty_steps_)
                                             : judge_step(config_, state_.control, state_.step + 1,
                                                          record.loss, record.grad_norm);
    if (verdict.action == StepAction::stop) diverged_ = verdict.reason;
    if (!diverged_.empty()) return {};
    record.batch = executor_->batch(state_.next_sample);
    const auto cursors = executor_->cursors();
    const int64_t epoch = cursors.empty() ? sampler_.epoch(state_.next_sample) : cursors[0].epoch;
    if (files_) {
      files_->add({state_.step + 1,
                   state_.next_sample,
                   record.batch,
                   epoch,
                   targets,
                   sums.text.hash,
                   verdict.reason,
                   {cursors.begin(), cursors.end()}});
    }
    if (state_.step == config_.optimizer.warmup) {
      state_.warmup_s = sums.elapsed_s;
      state_.control.warmup_tokens = state_.control.tokens;
    }
    record.lr = next_learning_rate(config_, state_, sums.elapsed_s);
    state_.next_sample += record.batch;
    state_.control.tokens += targets;
    state_.elapsed_s = sums.elapsed_s;
    stop_ = sums.stop;
    if (targets > 0) empty_steps_ = 0;
    if (verdict.action == StepAction::skip) return {};
    if (record.grad_norm == 0) note_zero_gradient();
    checkpoints_->before_update();
    executor_->update(AdamStep::make(config_, state_.step, record.lr, record.grad_norm));
    loss_ = record.loss;
    record.step = ++state_.step;
    record.tokens = targets;
    ranks_->describe_experts(config_, record);
    // Part of this step: the next forward pass does not wait for them.
    if (validates()) executor_->await_weights();
    if (checkpoints_->is_due(state_)) executor_->await_slices();
    if (checkpoints_->snapshot_bytes() > 0) record.checkpoint_ms = checkpoints_->take_blocked_ms();
    if (!std::exchange(has_noted_activations_, true)) {
      note(fmt::format("activations: {} on rank 0",
                       format_bytes(double(executor_->activation_bytes()))));
    }
    record.memory_bytes = memory_in_use(ranks_->chunks.front().stage.exec());
    record.state_bytes_per_parameter = ranks_->state_bytes_per_parameter();
    phase_log_->count_layer_bytes(record);
    exchange_step(groups_.world_axes(), ranks_->take_sent(), executor_->times(), record);
    const double seconds = seconds_since(start);
    record.step_ms = seconds * 1e3;
    record.tokens_per_s = double(targets) / seconds;
    const double computed = double(record.batch * config_.train.seq) / seconds;  // masked ones, too
    if (const auto line = utilization_.check_peak(computed)) note("warning: " + *line);
    record.mfu = utilization_.of(computed);
    phase_log_->end_step();
    return record;
  }

  void report(const std::vector<CheckFinding>& findings) {
    for (const CheckFinding& finding : findings) note("warning: " + describe(finding));
    if (checks_->stops()) corrupt_ = findings;
  }

  /// Saves nothing, and sets the state of the last step aside.
  [[noreturn]] void end_corrupt() {
    std::string saved;
    try {
      saved = checkpoints_->set_aside(state_.step);
    } catch (const Aborted&) {  // by a rank that is done with it, as all are then
      if (!checks_->replaces()) throw;
    }
    note_warnings();
    const std::string finding = describe(corrupt_.front());
    if (checks_->replaces() && request_.leave_corrupt) {
      const std::vector<int> suspects = suspected_ranks(corrupt_);
      note(fmt::format("warning: to be replaced: {}; the state after step {} is not used",
                       name_ranks(suspects), state_.step));
      if (!std::ranges::binary_search(suspects, world_.rank())) throw Aborted(suspects[0], finding);
      request_.leave_corrupt();
    }
    throw Error(fmt::format("{}; ended after step {}, whose weights are not saved; {}", finding,
                            state_.step, saved));
  }

  /// A norm of exactly 0 is noted once. Collective; before the update.
  void note_zero_gradient() {
    if (std::exchange(has_noted_zero_, true)) return;
    const std::string cause = describe_overflow(*trained_, LiveState(*trained_));
    note(fmt::format("warning: step {}: the gradient norm is 0: nothing is learned from it{}",
                     state_.step + 1, cause.empty() ? "" : "; " + cause));
  }

  /// Sums over the ranks.
  StepSums exchange(const StepExecutor::Result& result) {
    StepSums sums;
    sums.loss = result.loss;
    sums.squares = result.squares;
    sums.text = result.text;
    sums.elapsed_s = elapsed_before_ + seconds_since(run_start_);
    const bool is_late = config_.train.max_seconds > 0 && world_.rank() == 0 &&
                         seconds_since(request_.started) >= config_.train.max_seconds;
    sums.stop = is_late || (request_.stop && *request_.stop);
    sums.save = request_.saves && request_.saves->exchange(0) > 0;
    sums.running = checkpoints_->running();
    sums.failed = !failure().empty();
    sums.checks = checks_->sums(state_.step + 1);
    sums = exchange_sums(groups_.world_axes(), sums);
    running_ = sums.running;
    return sums;
  }

  /// This rank's: text that could not be read, or differs.
  const std::string& failure() const {
    return executor_->read_error().empty() ? error_ : executor_->read_error();
  }

  /// Untimed and untraced work after a step: validation and reporting.
  void end_step(StepRecord& record) {
    if (validates()) {
      const WorkScope scope("validation", 0);
      const auto begin = Clock::now();
      record.validation_loss = validation_->loss(
          record.step, [this](Transformer& model) { ranks_->copy_weights(model); }, request_.stop,
          progress_ ? &*progress_ : nullptr);
      record.validates_bytes = validation_->is_text();
      run_start_ += Clock::now() - begin;  // excluded from training time
      if (record.validation_loss) add_validation(state_.control, *record.validation_loss);
    }
    if (!files_) return;
    if (checkpoints_->saved_step() >= 0) record.saved_step = checkpoints_->saved_step();
    files_->add(record);
    progress_sink_->add(record);
  }

  /// Called after the last save; `unsaved`: why it failed.
  void rethrow_error(const std::string& unsaved) {
    const std::string saved =
        fmt::format("; ended after step {}, {}", state_.step,
                    unsaved.empty() ? "saved " + checkpoint_path(request_.out, state_.step)
                                    : "not saved: " + unsaved);
    for (const std::string& failure :
         on_every_rank(world_, "the end of the run", 0, [&] { return this->failure(); })) {
      if (!failure.empty()) throw IoError(failure + saved);
    }
    if (!diverged_.empty()) throw ConfigError(diverged_ + saved);
  }

  RunCheckpoints::Options checkpoint_options() {
    return {.out = request_.out,
            .model = config_.model,
            .schedule = CheckpointSchedule(config_),
            .keep = config_.checkpoint.keep,
            .memory = &*memory_,
            .peers = config_.checkpoint.peer_copy ? &groups_.dp() : nullptr,
            .prepare = [this] { files_->prepare_checkpoint(config_); }};
  }

  /// After a step: takes and starts to write a checkpoint that is due.
  void checkpoint() {
    const ScopedSpan span(SpanKind::checkpoint, "checkpoint");
    const bool requested = std::exchange(save_requested_, false);
    if (requested) executor_->await_weights();
    if (checkpoints_->is_due(state_)) executor_->progress();  // the first weights leave meanwhile
    checkpoints_->after_step(state_, requested, running_);
    if (injector_) injector_->after_save(checkpoints_->saved_step());
    note_warnings();
  }

  /// A run that ends before its first checkpoint must not be resumed from random weights.
  void save_initial_model() {
    if (init_from_.empty()) return;
    if (const std::string unsaved = save_now(); !unsaved.empty()) throw IoError(unsaved);
  }

  /// Saves the last step unless that is done. Returns the reason if it failed, or an empty string.
  std::string save_now() {
    const ScopedSpan span(SpanKind::checkpoint, "checkpoint");
    executor_->await_weights();
    std::string unsaved = checkpoints_->save_now(state_);
    if (injector_) injector_->after_save(checkpoints_->saved_step());
    note_warnings();
    return unsaved;
  }

  void note_warnings() {
    for (const std::string& text : checkpoints_->take_warnings()) note("warning: " + text);
  }

  Communicator& world_;
  const TrainRequest& request_;
  TrainConfig config_;  // with its dtype, format of data and replicas resolved
  const TokenSource& source_;
  Sampler sampler_;
  ParallelGroups groups_;
  std::optional<ProgressLine> progress_;  // rank 0
  std::optional<RunFiles> files_;         // rank 0
  std::optional<SnapshotMemory> memory_;
  std::optional<ModelRanks> ranks_;
  std::optional<TrainedRanks> trained_;
  std::optional<StepExecutor> executor_;
  std::optional<StateChecks> checks_;
  std::optional<FaultInjector> injector_;
  std::optional<Validation> validation_;
  Utilization utilization_;
  TrainState state_;
  std::optional<RunCheckpoints> checkpoints_;
  std::optional<ProgressSink> progress_sink_;  // rank 0
  std::optional<PhaseLog> phase_log_;
  std::optional<SelfCheck> self_check_;
  Clock::time_point run_start_;
  double elapsed_before_ = 0;
  int64_t empty_steps_ = 0;  // in a row, without targets
  double loss_ = NAN;
  bool has_noted_activations_ = false, has_noted_zero_ = false;
  bool stop_ = false, failed_ = false, save_requested_ = false;
  RunCheckpoints::Running running_;    // of any rank, during the step
  std::string init_from_;              // folder of the model whose weights the run starts from
  std::string error_;                  // this rank's, of text
  std::vector<CheckFinding> corrupt_;  // that end the run
  std::string diverged_;               // message if the loss is not finite; the same on all ranks
};

}  // namespace

TrainEnd train(Communicator& world, const TrainRequest& request, const TokenSource& source) {
  return Trainer(world, request, source).run();
}

}  // namespace tandem
