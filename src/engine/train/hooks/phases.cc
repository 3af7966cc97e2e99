#include <optional>

#include "engine/plan/cost/measured_cost.h"
#include "engine/train/checks/cost_probe.h"
#include "engine/train/checks/self_check.h"
#include "engine/train/hooks/hooks.h"

namespace tandem::hooks {
namespace {

class Phases : public StepHook {
 public:
  explicit Phases(Run& run) : run_(run) {
    if (run.measured_peak &&
        SelfCheck::applies(run.config.trace, run.config.train, run.groups, run.state.step)) {
      const plan::MeasuredCosts costs = measure_costs(run.config, run.groups);
      self_check_.emplace(plan::predict_step(run.config, costs), run.groups);
    }
  }

  bool waits_for_all(const Step& step) const override {
    return step.targets > 0 && self_check_ && self_check_->compares_next();
  }

  void after_step(Step& step) override {
    run_.phase_log->add(step.record);
    if (!self_check_) return;
    const bool is_ours = run_.files && run_.files->find_other_owner().empty();
    run_.note_lines(self_check_->add(step.record, run_.phase_log->phases(),
                                     is_ours ? run_.request.out + "/self_check.json" : ""));
  }

 private:
  Run& run_;
  std::optional<SelfCheck> self_check_;
};

}  // namespace

Hook make_phases(Run& run) {
  return std::make_unique<Phases>(run);
}

}  // namespace tandem::hooks
