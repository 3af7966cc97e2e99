// Injection of faults into a training run (engine/train/checks/fault_plan.h), for tests of what
// notices them. Each fault is a line of JSON in OUT/injected.jsonl, written before it happens.
#pragma once

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/parallel/dims.h"
#include "engine/parallel/sync/config.h"
#include "engine/train/checks/fault_plan.h"
#include "engine/train/model_ranks.h"
#include "engine/train/step_executor.h"

namespace tandem {

class FaultInjector {
 public:
  /// `plan`, `groups`, `ranks` and `sync` must outlive this object. CPU ranks: throws Unsupported
  /// on GPUs, and for slow links without an emulated one.
  FaultInjector(const FaultPlan& plan, const ParallelGroups& groups, ModelRanks& ranks,
                const SyncConfig& sync, const std::string& out);
  ~FaultInjector();
  FaultInjector(const FaultInjector&) = delete;
  FaultInjector& operator=(const FaultInjector&) = delete;

  /// Before the passes of a step: takes back kills of the step before after spans, which have not
  /// ended; kills, hangs, slows down, flips of weights and of the optimizer's
  /// state. All ranks wait for their weights first if one of them has a flip. Collective.
  void before_passes(int64_t step, StepExecutor& executor);
  /// After gradients are reduced: flips of these.
  void after_passes(int64_t step);
  /// At the run's end: takes back such kills, and returns what was awaited in vain in any step;
  /// empty: nothing. In the rank's own thread, as `before_passes`.
  std::string missed_kills();
  /// Flips in the files of the newest checkpoint, of `saved_step`, for faults up to this step.
  void after_save(int64_t saved_step);

 private:
  struct Spot;
  std::vector<Spot> spots(const Fault& fault, uint64_t draw) const;
  /// Whether the run met it before it was resumed.
  bool was_before(const Fault& fault) const;
  void slow(const Fault& fault);
  void slow_down_link(const Fault& fault);
  void shift_clock(const Fault& fault);
  void flip(const Fault& fault);
  void flip_file(const Fault& fault, const std::string& checkpoint);
  void take_back_kills();
  void record(const Fault& fault, const std::string& details);

  const FaultPlan& plan_;
  const ParallelGroups& groups_;
  ModelRanks& ranks_;
  const SyncConfig& sync_;
  std::string out_;
  std::vector<Fault> of_files_;      // to come after the next save
  std::vector<Fault> at_span_;       // kills after spans of this step
  std::vector<std::string> missed_;  // such kills of steps before
  // Faults of this rank before the run was resumed, by step and kind: a run ends by one once.
  std::set<std::pair<int64_t, std::string>> ended_before_;
};

}  // namespace tandem
