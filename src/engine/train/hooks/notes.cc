#include <fmt/format.h>

#include <string>
#include <utility>

#include "engine/train/hooks/hooks.h"
#include "engine/train/run_start.h"

namespace tandem::hooks {
namespace {

/// Lines of the log that a run shows once.
class Notes : public StepHook {
 public:
  explicit Notes(Run& run) : run_(run) {}

  void after_verdict(Step& step) override {
    if (step.verdict.action == StepAction::skip || step.record.grad_norm != 0) return;
    if (std::exchange(noted_zero_, true)) return;
    const std::string cause = describe_overflow(*run_.trained, LiveState(*run_.trained));
    run_.note(fmt::format("warning: step {}: the gradient norm is 0: nothing is learned from it{}",
                          step.number, cause.empty() ? "" : "; " + cause));
  }

  void after_update(Step&) override {
    if (std::exchange(noted_activations_, true)) return;
    run_.note(fmt::format("activations: {} on rank 0",
                          format_bytes(double(run_.executor->activation_bytes()))));
  }

 private:
  Run& run_;
  bool noted_zero_ = false, noted_activations_ = false;
};

}  // namespace

Hook make_notes(Run& run) {
  return std::make_unique<Notes>(run);
}

}  // namespace tandem::hooks
