// Steps of learners that report (engine/train/step_reports.h): a learner judges its own part of a
// step and goes on, and learns the sums, verdict and record of all later, when a report is read.
#pragma once

#include <deque>
#include <string>

#include "engine/train/hooks/hooks.h"
#include "engine/train/step_hook.h"
#include "engine/train/step_reports.h"

namespace tandem {

class ReportedSteps {
 public:
  static bool applies(const Run& run);
  /// Both must outlive this object. Collective.
  ReportedSteps(Run& run, const hooks::Hooks& hooks);

  /// The next step. It stays until its record is written.
  Step& begin();
  /// Verdict on this learner's part of a step. A part without update is none of the sums, and the
  /// step counts all the same, so that learners stay at the same step. After a verdict to stop, or
  /// an error, the learner makes no further update until all know of it.
  StepVerdict judge(Step& step);
  /// Adds the learner's sums of a step, which is judged. Returns whether it counts.
  bool add(Step& step);
  /// Around the exchange of weights of a step that counts: send or read a report that is due.
  void before_exchange(Step& step);
  void after_exchange(Step& step);
  /// Adds the learner's times of a step.
  void add_times(StepRecord& record);
  /// After a step was made or dropped: exchanges reports if all learners must be at this step.
  void end(Step& step, bool counts);
  /// Exchanges all that is due. `current`: the step that is made, or nullptr. Collective.
  void exchange(Step* current);

 private:
  /// Whether all ranks wait for one another after this step, made or dropped: in a hook, or as they
  /// verify the text after an epoch.
  bool waits_for_all(const Step& step) const;
  /// Whether learners must all be at the same step, with the same sums, after this one, which was
  /// made: also as they save, validate or end together.
  bool needs_all_learners(const Step& step) const;
  void send(Step* current);
  void receive(Step* current);
  /// Does with the sums of all what `judge` left to them.
  void settle(Step& step, const StepSums& total);
  void count_updates(Step& step);

  Run& run_;
  const hooks::Hooks& hooks_;
  StepReports reports_;
  std::deque<Step> steps_;  // whose record is not written, and the one that is made
  ControlState judged_;     // the run's, and this learner's steps since the last report was read
  ControlState reported_;   // `judged_` when the last report was sent
  bool is_idle_ = false;    // this learner makes no further update
  std::string end_reason_;  // of the first learner that makes none
  bool saves_ = false;      // a checkpoint was asked for
};

}  // namespace tandem
