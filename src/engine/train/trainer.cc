#include "engine/train/trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/system/process/clock.h"
#include "engine/checkpoint/run/run_end.h"
#include "engine/parallel/collective_check.h"
#include "engine/train/hooks/hooks.h"
#include "engine/train/reported_steps.h"
#include "engine/train/run.h"
#include "engine/train/run_start.h"
#include "engine/train/step_exchange.h"
#include "observe/file_activity.h"
#include "observe/recorder.h"
#include "tandem/error.h"

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;

/// In the order in which each moment of a step calls them: a run waits for its turn before its
/// trace begins; learners exchange weights before these are validated and saved; faults flip
/// gradients before these are checked, and files after a checkpoint.
hooks::Hooks make_hooks(Run& run) {
  hooks::Hooks all;
  for (const auto make :
       {hooks::make_requests, hooks::make_trace, hooks::make_sync, hooks::make_validation,
        hooks::make_records, hooks::make_checkpoints, hooks::make_faults, hooks::make_checks,
        hooks::make_notes, hooks::make_phases}) {
    if (auto hook = make(run)) all.push_back(std::move(hook));
  }
  return all;
}

class Trainer {
 public:
  Trainer(Communicator& world, const TrainRequest& request, const TokenSource& source)
      : run_(world, request, source), hooks_(make_hooks(run_)) {
    if (ReportedSteps::applies(run_)) reported_.emplace(run_, hooks_);
  }

  TrainEnd train() {
    run_.open_logs();
    run_.start = Clock::now();
    save_initial_model();
    StepRecord before;  // what was sent until now is of no step
    run_.phase_log->count_layer_bytes(before);
    run_.ending.stops = run_.request.only_saves;
    while (!run_.is_finished() && !run_.ending.is_set()) {
      const WorkScope scope("step", run_.executor->batch(run_.state.next_sample));
      Step summed;
      Step& step = reported_ ? reported_->begin() : summed;
      step.number = run_.state.step + 1;
      call(&StepHook::before_step, step);
      const bool counts = make(step);
      if (reported_) reported_->end(step, counts);
      call(counts ? &StepHook::after_step : &StepHook::after_dropped_step, step);
    }
    if (reported_) reported_->exchange(nullptr);
    return end();
  }

 private:
  void call(void (StepHook::*moment)(Step&), Step& step) { hooks::call(hooks_, moment, step); }

  /// Returns false for a step that is dropped: weights and optimizer have not changed. Its samples
  /// were consumed, or the run ends after the previous step.
  bool make(Step& step) {
    const auto start = Clock::now();
    recorder().reset();
    const int64_t first = step.first_sample = run_.state.next_sample;
    // Not before the ranks' times of the step before, which would arrive after the first weights.
    run_.executor->progress();
    run_.executor->verify_text(first);
    step.targets = run_.executor->targets(first);
    call(&StepHook::before_passes, step);
    step.compute = [this, first, &step] { return run_.executor->compute(first, step.targets); };
    step.result = step.compute();
    call(&StepHook::after_passes, step);
    exchange(step);
    if (!reported_) call(&StepHook::after_sums, step);
    if (run_.ending.drops_step() || !judge(step)) return false;
    TrainState& state = run_.state;
    call(&StepHook::before_update, step);
    if (step.verdict.action == StepAction::update) {
      run_.executor->update(AdamStep::make(run_.config.optimizer, state.step, step.record.lr,
                                           std::sqrt(step.sums.learner_squares)));
    }
    step.record.step = ++state.step;
    if (!reported_) run_.loss = step.record.loss;
    run_.ranks->describe_experts(step.record);
    if (reported_) reported_->before_exchange(step);
    call(&StepHook::after_update, step);
    if (reported_) reported_->after_exchange(step);
    measure(step.record, start);
    return true;
  }

  /// Sums over the ranks, of learners that report those of one.
  void exchange(Step& step) {
    StepSums& sums = step.sums;
    sums.loss = step.result.loss;
    sums.squares = step.result.squares;
    sums.text = step.result.text;
    sums.elapsed_s = run_.elapsed_s();
    sums.failed = !run_.failure().empty();
    sums = reported_ ? exchange_learner_sums(run_.groups, sums) : exchange_sums(run_.groups, sums);
    const int64_t dp = run_.config.parallel.dp;
    if (!sums.failed && !sums.text.agrees(reported_ ? dp / run_.groups.dims().learners() : dp)) {
      run_.ending.error = fmt::format(
          "step {}: ranks of one replica have read different text: expected the same files on all "
          "machines",
          step.number);
      sums.failed = true;
    }
    if (!reported_) run_.ending.failed = sums.failed;
  }

  /// Consumes the step's samples, unless the run ends. Returns whether the step counts.
  bool judge(Step& step) {
    TrainState& state = run_.state;
    const OptimizerConfig& optimizer = run_.config.optimizer;
    const RunConfig& train = run_.config.train;
    StepRecord& record = step.record;
    record.loss = step.sums.loss / double(std::max<int64_t>(1, step.targets));
    record.grad_norm = std::sqrt(step.sums.squares / run_.groups.dims().learners());
    step.verdict = step.targets == 0 ? judge_empty_step(step.number, ++empty_steps_)
                   : reported_       ? reported_->judge(step)
                                     : judge_step(train, optimizer.lr, state.control, step.number,
                                                  record.loss, record.grad_norm);
    if (step.verdict.action == StepAction::stop) run_.ending.diverged = step.verdict.reason;
    if (!run_.ending.diverged.empty()) return false;
    record.batch = run_.executor->batch(state.next_sample);
    record.tokens = step.targets;
    if (!reported_) call(&StepHook::after_verdict, step);
    if (state.step == optimizer.warmup) {
      state.warmup_s = step.sums.elapsed_s;
      state.control.warmup_tokens = state.control.tokens;
    }
    record.lr = next_learning_rate(optimizer, train, state, step.sums.elapsed_s);
    state.next_sample += record.batch;
    state.control.tokens += step.targets;
    if (step.targets > 0) empty_steps_ = 0;
    if (reported_) return reported_->add(step);
    state.elapsed_s = step.sums.elapsed_s;
    run_.ending.stops = step.sums.stop;
    return step.verdict.action != StepAction::skip;
  }

  void measure(StepRecord& record, Clock::time_point start) {
    record.memory_bytes = memory_in_use(run_.ranks->chunks.front().stage.exec());
    record.state_bytes_per_parameter = run_.ranks->state_bytes_per_parameter();
    run_.phase_log->count_layer_bytes(record);
    if (reported_) {
      reported_->add_times(record);
    } else {
      exchange_step(run_.groups.world_axes(), run_.ranks->take_sent(), run_.executor->times(),
                    record);
    }
    const double seconds = seconds_since(start);
    record.step_ms = seconds * 1e3;
    record.tokens_per_s = double(record.tokens) / seconds;
    const double computed = double(record.batch * run_.config.train.seq) / seconds;  // masked, too
    if (const auto line = run_.utilization.check_peak(computed)) run_.note("warning: " + *line);
    record.mfu = run_.utilization.of(computed);
    run_.phase_log->end_step();
  }

  /// A run that ends before its first checkpoint must not be resumed from random weights.
  void save_initial_model() {
    if (run_.init_from.empty()) return;
    if (const std::string unsaved = run_.save_now(); !unsaved.empty()) throw IoError(unsaved);
  }

  TrainEnd end() {
    run_.on_output("the folder of the run", [&] { run_.files->require_output(); });
    for (const auto& hook : hooks_) hook->before_end();
    const bool saves = !run_.request.only_saves || run_.memory->restored() >= 0;
    const std::string unsaved = saves ? run_.save_now() : "";
    const FileActivity ends("end");
    for (const auto& hook : hooks_) hook->at_end();
    const std::string& out = run_.request.out;
    const TrainState& state = run_.state;
    rethrow_error(unsaved);
    const bool stopped = run_.request.only_saves || !run_.is_finished();
    if (!stopped && run_.config.train.early_stop > 0)
      run_.note(describe_end(state, run_.config.train));
    if (!unsaved.empty() && stopped) throw IoError(unsaved);
    if (!unsaved.empty()) {
      run_.note(fmt::format("warning: step {} not saved: {}", state.step, unsaved));
    }
    const bool has_lowest =
        run_.config.train.save_best && state.control.validations_since_lowest >= 0;
    if (!stopped && has_lowest && run_.has_final()) {
      run_.note(fmt::format("{}/final has the weights with the lowest validation loss, {:.4f}", out,
                            state.control.lowest_validation_loss));
    } else if (!stopped) {
      if (has_lowest) {
        run_.note(
            fmt::format("warning: {}/final was removed: it now has the last weights, not those "
                        "with the lowest validation loss",
                        out));
      }
      run_.write_final();
    }
    if (!unsaved.empty() && run_.checkpoints->saved_step() < 0) {
      throw IoError(
          fmt::format("{}/final is written, but no checkpoint could be saved: {}", out, unsaved));
    }
    if (run_.progress) run_.progress->finish();
    run_.note_lines(describe_streams(run_.source));
    run_.note(describe_peak(run_.ranks->chunks.front().stage.exec()));
    return {stopped, state.step, run_.loss,
            saves && unsaved.empty() ? checkpoint_path(out, state.step) : ""};
  }

  /// Called after the last save; `unsaved`: why it failed.
  void rethrow_error(const std::string& unsaved) {
    const std::string saved =
        fmt::format("; ended after step {}, {}", run_.state.step,
                    unsaved.empty() ? "saved " + checkpoint_path(run_.request.out, run_.state.step)
                                    : "not saved: " + unsaved);
    for (const std::string& failure :
         on_every_rank(run_.world, "the end of the run", 0, [&] { return run_.failure(); })) {
      if (!failure.empty()) throw IoError(failure + saved);
    }
    if (!run_.ending.diverged.empty()) throw ConfigError(run_.ending.diverged + saved);
  }

  Run run_;
  hooks::Hooks hooks_;
  int64_t empty_steps_ = 0;                // in a row, without targets
  std::optional<ReportedSteps> reported_;  // of learners that report
};

}  // namespace

TrainEnd train(Communicator& world, const TrainRequest& request, const TokenSource& source) {
  return Trainer(world, request, source).train();
}

}  // namespace tandem
