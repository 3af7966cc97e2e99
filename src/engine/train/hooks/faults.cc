#include "engine/train/checks/fault_injector.h"
#include "engine/train/hooks/hooks.h"
#include "tandem/error.h"

namespace tandem::hooks {
namespace {

class Faults : public StepHook {
 public:
  explicit Faults(Run& run)
      : run_(run),
        injector_(run.request.faults, run.groups, *run.ranks, run.config.parallel.sync,
                  run.request.out) {
    if (run.request.faults.has(FaultKind::late_message) && !run.config.parallel.sync.has_quorum()) {
      throw ConfigError("--inject: late_message: expected sync.quorum below sync.learners");
    }
  }

  void before_passes(Step& step) override { injector_.before_passes(step.number, *run_.executor); }
  void after_passes(Step& step) override { injector_.after_passes(step.number); }
  void after_step(Step&) override { at_end(); }
  void at_end() override { injector_.after_save(run_.checkpoints->saved_step()); }

 private:
  Run& run_;
  FaultInjector injector_;
};

}  // namespace

Hook make_faults(Run& run) {
  return run.request.faults.empty() ? nullptr : std::make_unique<Faults>(run);
}

}  // namespace tandem::hooks
