#include <nlohmann/json.hpp>
#include <optional>

#include "core/system/json.h"
#include "engine/train/hooks/hooks.h"
#include "engine/train/records/progress_sink.h"
#include "overlap/contract/receipt.h"

namespace tandem::hooks {
namespace {

/// Writes on rank 0, at the end also its operators' receipts; a rank whose OUT became another run's
/// fails.
class Records : public StepHook {
 public:
  explicit Records(Run& run) : run_(run) {
    if (!run.files) return;
    progress_.emplace(run.config.train, run.config.parallel, *run.progress, run.state);
  }

  void before_passes(Step&) override {
    if (run_.files && run_.ending.error.empty()) {
      run_.ending.error = run_.files->find_other_owner();
    }
  }

  void after_passes(Step& step) override {
    const auto cursors = run_.executor->cursors();
    step.cursors.assign(cursors.begin(), cursors.end());
  }

  void after_verdict(Step& step) override {
    if (!run_.files || !run_.ending.error.empty()) return;
    run_.files->add(
        {step.number, step.first_sample, step.record.batch,
         step.cursors.empty() ? run_.sampler.epoch(step.first_sample) : step.cursors[0].epoch,
         step.targets, step.sums.text.hash, step.verdict.reason, step.cursors, step.no_update});
  }

  void after_step(Step& step) override {
    if (step.is_complete) after_late_record(step);
  }

  void after_late_record(Step& step) override {
    if (!run_.files || !run_.ending.error.empty()) return;
    const int64_t saved = run_.checkpoints->saved_step();
    if (saved >= 0) step.record.saved_step = saved;
    run_.files->add(step.record);
    progress_->add(step.record);
  }

  void at_end() override {
    if (run_.files) run_.files->write("receipts.json", dump_json(to_json(receipts()), 1) + '\n');
  }

 private:
  Run& run_;
  std::optional<ProgressSink> progress_;
};

}  // namespace

Hook make_records(Run& run) {
  return std::make_unique<Records>(run);
}

}  // namespace tandem::hooks
