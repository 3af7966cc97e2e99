#include "engine/parallel/collective_check.h"
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
  void after_step(Step&) override { flip_files(); }
  void at_end() override {
    flip_files();
    const std::string missed = injector_.missed_kills();
    on_every_rank(run_.world, "the end of injected faults", 0, [&] {
      if (!missed.empty()) throw ConfigError(missed);
      return std::string();
    });
  }

 private:
  void flip_files() { injector_.after_save(run_.checkpoints->saved_step()); }

  Run& run_;
  FaultInjector injector_;
};

}  // namespace

Hook make_faults(Run& run) {
  return run.request.faults.empty() ? nullptr : std::make_unique<Faults>(run);
}

}  // namespace tandem::hooks
