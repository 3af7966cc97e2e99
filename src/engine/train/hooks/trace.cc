#include "engine/train/hooks/hooks.h"
#include "engine/train/trace_steps.h"

namespace tandem::hooks {
namespace {

class Trace : public StepHook {
 public:
  explicit Trace(const Run& run)
      : run_(run),
        steps_(run.world, run.config.trace, run.config.train, run.state.step, run.request.out) {}

  bool waits_for_all(const Step& step) const override {
    return steps_.measures_clocks_after(run_.state.step, step.targets == 0);
  }
  void before_step(Step&) override { steps_.before_step(run_.state.step); }
  void after_step(Step&) override { steps_.after_step(run_.state.step); }
  void after_dropped_step(Step&) override { steps_.drop_step(); }
  void at_end() override { steps_.finish(); }

 private:
  const Run& run_;
  TraceSteps steps_;
};

}  // namespace

Hook make_trace(Run& run) {
  return std::make_unique<Trace>(run);
}

}  // namespace tandem::hooks
