#include "engine/parallel/sync/outer_sync.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <vector>

#include "engine/report/progress.h"
#include "engine/train/hooks/hooks.h"

namespace tandem::hooks {
namespace {

/// Learners that faults make late, or nothing if the run injects no such fault.
OuterSync::LateLearners late_learners(const Run& run) {
  const FaultPlan& faults = run.request.faults;
  if (!faults.has(FaultKind::late_message)) return {};
  return [&faults, &dims = run.groups.dims()](int64_t step) {
    std::vector<int> late;
    for (const Fault& fault : faults.at(step)) {
      if (fault.kind == FaultKind::late_message) late.push_back(dims.learner(fault.rank));
    }
    return late;
  };
}

/// Largest of the ranks' bytes. Collective.
uint64_t largest_bytes(Communicator& world, uint64_t bytes) {
  for (const auto& of_rank : world.exchange(std::as_bytes(std::span(&bytes, 1)), "exchanges")) {
    uint64_t other = 0;
    std::memcpy(&other, of_rank.data(), sizeof other);
    bytes = std::max(bytes, other);
  }
  return bytes;
}

class Sync : public StepHook {
 public:
  explicit Sync(Run& run)
      : run_(run),
        sync_(*run.groups.sync(), run.config.parallel.sync,
              run.ranks->outer_stages(run.config.optimizer), run.state.step, late_learners(run)) {
    run.note(fmt::format("exchanges: {} on the rank with most",
                         format_bytes(double(largest_bytes(run.world, sync_.bytes())))));
  }

  void after_update(Step& step) override {
    const bool applies = sync_.applies(run_.state.step);
    if (!applies && !sync_.sends(run_.state.step)) return;
    // Weights that only leave need not be here from all owners.
    applies ? run_.executor->await_weights() : run_.executor->await_slices();
    if (sync_.after_update(run_.state.step, step.record.lr)) {
      run_.executor->gather_weights();
      if (run_.config.parallel.sync.has_quorum()) step.record.counted_learners = sync_.counted();
    }
    step.record.sync_bytes = sync_.take_sent();
  }
  /// For the final model: the last steps are in no exchange, or in one that is not applied.
  void at_end() override {
    if (!run_.is_finished()) return;
    run_.executor->await_weights();
    sync_.average_weights(run_.state.step);
  }

 private:
  Run& run_;
  OuterSync sync_;
};

}  // namespace

Hook make_sync(Run& run) {
  return run.groups.sync() ? std::make_unique<Sync>(run) : nullptr;
}

}  // namespace tandem::hooks
