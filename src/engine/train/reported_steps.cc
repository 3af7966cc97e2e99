#include "engine/train/reported_steps.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "engine/train/step_exchange.h"

namespace tandem {

bool ReportedSteps::applies(const Run& run) {
  return StepReports::applies(run.config.parallel.sync, run.config.train, run.config.check);
}

ReportedSteps::ReportedSteps(Run& run, const hooks::Hooks& hooks)
    : run_(run),
      hooks_(hooks),
      reports_(*run.groups.sync(), run.config.parallel.sync),
      judged_(run.state.control) {}

Step& ReportedSteps::begin() {
  while (!steps_.empty() && steps_.front().is_complete) steps_.pop_front();
  Step& step = steps_.emplace_back();
  step.is_summed = step.is_complete = step.is_agreed = false;
  return step;
}

bool ReportedSteps::add(Step& step) {
  reports_.add(step.sums);
  if (step.targets == 0 && reports_.is_full()) send(&step);
  return step.targets > 0;
}

void ReportedSteps::before_exchange(Step& step) {
  if (reports_.sends(run_.state.step)) send(&step);
}

void ReportedSteps::after_exchange(Step& step) {
  if (reports_.receives(run_.state.step)) receive(&step);
}

void ReportedSteps::add_times(StepRecord& record) {
  const auto local = StepTimes::of_rank(run_.ranks->take_sent(), run_.executor->times(), record);
  reports_.add(exchange_times(run_.groups.learner_axes(), local));
  record.counts_layer_bytes = !run_.groups.on_gpus();
}

void ReportedSteps::end(Step& step, bool counts) {
  if (counts ? needs_all_learners(step) : waits_for_all(step)) exchange(&step);
}

StepVerdict ReportedSteps::judge(Step& step) {
  StepSums& sums = step.sums;
  const double loss = sums.loss / double(std::max<int64_t>(1, step.result.targets)),
               norm = std::sqrt(sums.squares);
  StepVerdict verdict;
  if (step.result.targets > 0) {  // else there is no loss to judge, nor to be in the mean
    verdict =
        judge_step(run_.config.train, run_.config.optimizer.lr, judged_, step.number, loss, norm);
  }
  if (sums.failed) reports_.end_updates(run_.failure());
  if (verdict.action == StepAction::stop) reports_.end_updates(verdict.reason);
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

bool ReportedSteps::waits_for_all(const Step& step) const {
  const bool ends_epoch = run_.sampler.ended_epochs(run_.state.next_sample) !=
                          run_.sampler.ended_epochs(step.first_sample);
  return ends_epoch ||
         std::ranges::any_of(hooks_, [&](const auto& hook) { return hook->waits_for_all(step); });
}

bool ReportedSteps::needs_all_learners(const Step& step) const {
  return waits_for_all(step) || run_.checkpoints->is_due(run_.state) || saves_ ||
         run_.validates() || run_.is_finished() || run_.ending.is_set();
}

void ReportedSteps::send(Step* current) {
  if (reports_.travels()) receive(current);
  reports_.send();
  reported_ = judged_;
}

void ReportedSteps::exchange(Step* current) {
  send(current);
  receive(current);
  saves_ = false;
}

void ReportedSteps::receive(Step* current) {
  const StepReports::Totals totals = reports_.receive();
  for (size_t learner = 0; learner < totals.ends.size() && end_reason_.empty(); ++learner) {
    if (totals.ends[learner].empty()) continue;
    end_reason_ = fmt::format("learner {}: {}", learner, totals.ends[learner]);
  }
  auto summed = std::ranges::find(steps_, false, &Step::is_summed);
  for (const StepSums& total : totals.sums) settle(*summed++, total);
  auto complete = std::ranges::find(steps_, false, &Step::is_complete);
  for (const StepTimes& times : totals.times) {
    while (complete->is_complete) ++complete;  // of dropped ones
    times.write(run_.world.size(), complete->record);
    complete->is_complete = true;
    if (&*complete != current) hooks::call(hooks_, &StepHook::after_late_record, *complete);
  }
  if (!run_.ending.failed && run_.ending.diverged.empty()) run_.ending.diverged = end_reason_;
  // With what this learner has skipped since it sent the report.
  const int64_t nonfinite = judged_.nonfinite_skips - reported_.nonfinite_skips;
  const int64_t spikes = judged_.spike_skips - reported_.spike_skips;
  judged_ = run_.state.control;
  judged_.nonfinite_skips += nonfinite;
  judged_.spike_skips += spikes;
  if (current) current->is_agreed = true;
}

void ReportedSteps::settle(Step& step, const StepSums& total) {
  const bool was_dropped = step.targets == 0;
  step.sums = total;
  step.is_summed = true;
  step.is_complete = was_dropped;
  hooks::call(hooks_, &StepHook::after_sums, step);
  TrainState& state = run_.state;
  state.elapsed_s = total.elapsed_s;
  if (step.number - 1 == run_.config.optimizer.warmup) state.warmup_s = total.elapsed_s;
  run_.ending.stops = run_.ending.stops || total.stop;
  run_.ending.failed = run_.ending.failed || total.failed;
  saves_ = saves_ || total.save;
  if (!was_dropped) count_updates(step);
  hooks::call(hooks_, &StepHook::after_verdict, step);
}

void ReportedSteps::count_updates(Step& step) {
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
  step.no_update =
      fmt::format("{} of {} learners made no update: {}", learners - total.updates, learners,
                  total.is_nonfinite ? "a loss or gradient norm is not finite"
                  : total.is_spike   ? "the loss is a spike"
                                     : "the run ends");
  if (total.ends_updates && !end_reason_.empty()) step.no_update += ": " + end_reason_;
  run_.note(fmt::format("warning: step {}: {}", step.number, step.no_update));
}

}  // namespace tandem
