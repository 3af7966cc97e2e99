#include "engine/train/trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/system/process/clock.h"
#include "engine/checkpoint/run/run_end.h"
#include "engine/parallel/collective_check.h"
#include "engine/train/hooks/hooks.h"
#include "engine/train/run.h"
#include "engine/train/run_start.h"
#include "engine/train/step_exchange.h"
#include "engine/train/step_reports.h"
#include "observe/file_activity.h"
#include "observe/recorder.h"
#include "tandem/error.h"

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;
using Hooks = std::vector<hooks::Hook>;

/// In the order in which each moment of a step calls them: a run waits for its turn before its
/// trace begins; learners exchange weights before these are validated and saved; faults flip
/// gradients before these are checked, and files after a checkpoint.
Hooks make_hooks(Run& run) {
  Hooks all;
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
      : run_(world, request, source), hooks_(make_hooks(run_)), judged_(run_.state.control) {
    const SyncConfig& sync = run_.config.parallel.sync;
    if (StepReports::applies(sync, run_.config.train, run_.config.check)) {
      reports_.emplace(*run_.groups.sync(), sync);
    }
  }

  TrainEnd train() {
    run_.open_logs();
    run_.start = Clock::now();
    save_initial_model();
    run_.ending.stops = run_.request.only_saves;
    while (!run_.is_finished() && !run_.ending.is_set()) {
      const WorkScope scope("step", run_.executor->batch(run_.state.next_sample));
      Step& step = steps_.emplace_back();
      step.number = run_.state.step + 1;
      step.is_summed = step.is_complete = step.is_agreed = !reports_;
      call(&StepHook::before_step, step);
      const bool counts = make(step);
      if (reports_ && (counts ? needs_all_learners(step) : waits_for_all(step))) {
        exchange_reports(&step);
      }
      call(counts ? &StepHook::after_step : &StepHook::after_dropped_step, step);
      drop_complete_steps();
    }
    if (reports_) exchange_reports(nullptr);
    return end();
  }

 private:
  void call(void (StepHook::*moment)(Step&), Step& step) {
    for (const auto& hook : hooks_) ((*hook).*moment)(step);
  }

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
    if (!reports_) call(&StepHook::after_sums, step);
    if (run_.ending.drops_step() || !judge(step)) return false;
    TrainState& state = run_.state;
    call(&StepHook::before_update, step);
    if (step.verdict.action == StepAction::update) {
      run_.executor->update(AdamStep::make(run_.config.optimizer, state.step, step.record.lr,
                                           std::sqrt(step.sums.learner_squares)));
    }
    step.record.step = ++state.step;
    if (!reports_) run_.loss = step.record.loss;
    run_.ranks->describe_experts(step.record);
    if (reports_ && reports_->sends(state.step)) send_report(&step);
    call(&StepHook::after_update, step);
    if (reports_ && reports_->receives(state.step)) receive_report(&step);
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
    sums = reports_ ? exchange_learner_sums(run_.groups, sums) : exchange_sums(run_.groups, sums);
    const int64_t dp = run_.config.parallel.dp;
    if (!sums.failed && !sums.text.agrees(reports_ ? dp / run_.groups.dims().learners() : dp)) {
      run_.ending.error = fmt::format(
          "step {}: ranks of one replica have read different text: expected the same files on all "
          "machines",
          step.number);
      sums.failed = true;
    }
    if (!reports_) run_.ending.failed = sums.failed;
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
                   : reports_        ? judge_learner(step)
                                     : judge_step(train, optimizer.lr, state.control, step.number,
                                                  record.loss, record.grad_norm);
    if (step.verdict.action == StepAction::stop) run_.ending.diverged = step.verdict.reason;
    if (!run_.ending.diverged.empty()) return false;
    record.batch = run_.executor->batch(state.next_sample);
    record.tokens = step.targets;
    if (!reports_) call(&StepHook::after_verdict, step);
    if (state.step == optimizer.warmup) {
      state.warmup_s = step.sums.elapsed_s;
      state.control.warmup_tokens = state.control.tokens;
    }
    record.lr = next_learning_rate(optimizer, train, state, step.sums.elapsed_s);
    state.next_sample += record.batch;
    state.control.tokens += step.targets;
    if (step.targets > 0) empty_steps_ = 0;
    if (reports_) {
      reports_->add(step.sums);
      if (step.targets == 0 && reports_->is_full()) send_report(&step);
      return step.targets > 0;
    }
    state.elapsed_s = step.sums.elapsed_s;
    run_.ending.stops = step.sums.stop;
    return step.verdict.action != StepAction::skip;
  }

  /// Verdict on this learner's part of a step. A part without update is none of the sums, and the
  /// step counts all the same, so that learners stay at the same step. After a verdict to stop, or
  /// an error, the learner makes no further update until all know of it.
  StepVerdict judge_learner(Step& step) {
    StepSums& sums = step.sums;
    const double loss = sums.loss / double(std::max<int64_t>(1, step.result.targets)),
                 norm = std::sqrt(sums.squares);
    StepVerdict verdict;
    if (step.result.targets > 0) {  // else there is no loss to judge, nor to be in the mean
      verdict =
          judge_step(run_.config.train, run_.config.optimizer.lr, judged_, step.number, loss, norm);
    }
    if (verdict.action == StepAction::stop) reports_->end_updates(verdict.reason);
    const bool was_idle = is_idle_;
    is_idle_ = is_idle_ || sums.failed || verdict.action == StepAction::stop;
    if (!is_idle_ && verdict.action == StepAction::update) {
      sums.updates = 1;
      sums.targets = step.result.targets;
      return verdict;
    }
    const bool is_judged = !was_idle && !sums.failed;
    const bool is_finite = std::isfinite(loss) && std::isfinite(norm);
    sums.is_nonfinite = is_judged && !is_finite;
    sums.is_spike = is_judged && is_finite;
    sums.ends_updates = is_idle_;
    sums.loss = sums.squares = 0;
    return {StepAction::skip, ""};
  }

  /// Whether all ranks wait for one another after this step, made or dropped: in a hook, or as they
  /// verify the text after an epoch.
  bool waits_for_all(const Step& step) const {
    const bool ends_epoch = run_.sampler.ended_epochs(run_.state.next_sample) !=
                            run_.sampler.ended_epochs(step.first_sample);
    return ends_epoch ||
           std::ranges::any_of(hooks_, [&](const auto& hook) { return hook->waits_for_all(step); });
  }

  /// Whether learners that report must all be at the same step, with the same sums, after this one,
  /// which was made: also as they save, validate or end together.
  bool needs_all_learners(const Step& step) const {
    return waits_for_all(step) || run_.checkpoints->is_due(run_.state) || saves_ ||
           run_.validates() || run_.is_finished() || run_.ending.is_set();
  }

  void send_report(Step* current) {
    if (reports_->travels()) receive_report(current);
    reports_->send();
    reported_ = judged_;
  }

  /// All that is due. `current`: the step that is made, if there is one.
  void exchange_reports(Step* current) {
    send_report(current);
    receive_report(current);
    saves_ = false;
  }

  void receive_report(Step* current) {
    const StepReports::Totals totals = reports_->receive();
    auto summed = std::ranges::find(steps_, false, &Step::is_summed);
    for (const StepSums& total : totals.sums) settle(*summed++, total);
    auto complete = std::ranges::find(steps_, false, &Step::is_complete);
    for (const StepTimes& times : totals.times) {
      while (complete->is_complete) ++complete;  // of dropped ones
      times.write(run_.world.size(), complete->record);
      complete->is_complete = true;
      if (&*complete != current) call(&StepHook::after_late_record, *complete);
    }
    for (size_t learner = 0; learner < totals.ends.size(); ++learner) {
      if (totals.ends[learner].empty() || !run_.ending.diverged.empty()) continue;
      run_.ending.diverged = fmt::format("learner {}: {}", learner, totals.ends[learner]);
    }
    // With what this learner has skipped since it sent the report.
    const int64_t nonfinite = judged_.nonfinite_skips - reported_.nonfinite_skips;
    const int64_t spikes = judged_.spike_skips - reported_.spike_skips;
    judged_ = run_.state.control;
    judged_.nonfinite_skips += nonfinite;
    judged_.spike_skips += spikes;
    if (current) current->is_agreed = true;
  }

  /// `total`: sums of a step of learners that report. Does what `judge` leaves to them.
  void settle(Step& step, const StepSums& total) {
    const bool was_dropped = step.targets == 0;
    step.sums = total;
    step.is_summed = true;
    step.is_complete = was_dropped;
    call(&StepHook::after_sums, step);
    TrainState& state = run_.state;
    state.elapsed_s = total.elapsed_s;
    if (step.number - 1 == run_.config.optimizer.warmup) state.warmup_s = total.elapsed_s;
    run_.ending.stops = run_.ending.stops || total.stop;
    run_.ending.failed = run_.ending.failed || total.failed;
    saves_ = saves_ || total.save;
    if (!was_dropped) count_updates(step);
    call(&StepHook::after_verdict, step);
  }

  void count_updates(Step& step) {
    const StepSums& total = step.sums;
    const int learners = run_.groups.dims().learners();
    step.record.loss = total.targets > 0 ? total.loss / double(total.targets) : NAN;
    step.record.grad_norm =
        total.updates > 0 ? std::sqrt(total.squares / double(total.updates)) : NAN;
    if (total.targets > 0) run_.loss = step.record.loss;
    step.verdict = {total.updates > 0 ? StepAction::update : StepAction::skip, ""};
    ControlState& control = run_.state.control;
    if (total.updates == learners) return accept_loss(control, run_.loss);
    control.nonfinite_skips += total.is_nonfinite && !total.ends_updates;  // one too many ends it
    control.spike_skips += total.is_spike && !total.ends_updates;
    run_.note(fmt::format("warning: step {}: {} of {} learners made no update{}", step.number,
                          learners - total.updates, learners,
                          total.is_nonfinite ? ": a loss or gradient norm is not finite"
                          : total.is_spike   ? ": the loss is a spike"
                                             : ": the run ends"));
  }

  /// Those whose record is written.
  void drop_complete_steps() {
    while (!steps_.empty() && steps_.front().is_complete) steps_.pop_front();
  }

  void measure(StepRecord& record, Clock::time_point start) {
    record.memory_bytes = memory_in_use(run_.ranks->chunks.front().stage.exec());
    record.state_bytes_per_parameter = run_.ranks->state_bytes_per_parameter();
    run_.phase_log->count_layer_bytes(record);
    if (reports_) {
      const auto local =
          StepTimes::of_rank(run_.ranks->take_sent(), run_.executor->times(), record);
      reports_->add(exchange_times(run_.groups.learner_axes(), local));
      record.counts_layer_bytes = !run_.groups.on_gpus();
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
    if (!stopped) {
      run_.on_output("the folder of the run", [&] { run_.files->require_output(); });
      save_final(*run_.trained, LiveState(*run_.trained), out, state, run_.config.model,
                 parse_dtype(run_.config.checkpoint.export_dtype));
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
  Hooks hooks_;
  int64_t empty_steps_ = 0;  // in a row, without targets
  // Used by learners that report.
  std::optional<StepReports> reports_;
  std::deque<Step> steps_;  // whose record is not written, and the one that is made
  ControlState judged_;     // the run's, and this learner's steps since the last report was read
  ControlState reported_;   // `judged_` when the last report was sent
  bool is_idle_ = false;    // this learner makes no further update
  bool saves_ = false;      // a checkpoint was asked for
};

}  // namespace

TrainEnd train(Communicator& world, const TrainRequest& request, const TokenSource& source) {
  return Trainer(world, request, source).train();
}

}  // namespace tandem
