// Sums and times of steps that learners send each other behind the steps, for the verdicts and
// records of all: a step waits for another learner only in an exchange (engine/parallel/sync/).
//
// Each rank has those of its learner (engine/train/step_exchange.h) and sends them to the ranks at
// the same place in the other learners: with every fragment that leaves, to be read when that
// fragment is applied, with a quorum before the next one is sent, as that is how far behind a
// learner may be; and before a checkpoint or a validation, where all must know the same, at
// once. Totals add the learners in their order, so they have the bits of sums made in each step.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/parallel/sync/learner_messages.h"
#include "engine/train/config.h"
#include "engine/train/step_exchange.h"

namespace tandem {

class StepReports {
 public:
  /// Whether the learners of a run report. They sum in every step instead with method demo,
  /// whose weights follow all gradients, if time decides when the run ends, and if data in memory
  /// are checked.
  static bool applies(const SyncConfig& sync, const RunConfig& train, const IntegrityConfig& check);
  /// `learners`: as of OuterSync. `sync` must outlive this object. Collective.
  StepReports(Communicator& learners, const SyncConfig& sync);

  /// Add this learner's, of consecutive steps.
  void add(const StepSums& learner) { sums_.push_back(learner); }
  void add(const StepTimes& learner) { times_.push_back(learner); }
  /// For a verdict that ends the run: the first reason given is sent with every report.
  void end_updates(const std::string& reason);

  /// One must leave before another step is added.
  bool is_full() const;
  /// Whether a report leaves after `step`, and whether one that has left must be read. The same on
  /// every rank.
  bool sends(int64_t step) const;
  bool receives(int64_t step) const;
  /// One has left and was not read.
  bool travels() const { return travels_; }
  /// Sends what was added since the last call. None may travel.
  void send();
  struct Totals {
    std::vector<StepSums> sums;  ///< of consecutive steps, as they were added
    std::vector<StepTimes> times;
    std::vector<std::string> ends;  ///< by learner: its reason of end_updates, or empty
  };
  /// The learners' sums of what was sent. Waits for all. Throws Timeout or Aborted.
  Totals receive();

 private:
  const SyncConfig& sync_;
  std::unique_ptr<Communicator> learners_;
  LearnerMessages messages_;
  std::vector<StepSums> sums_;  // this and the next: to be sent
  std::vector<StepTimes> times_;
  std::string end_;
  bool travels_ = false;
};

}  // namespace tandem
