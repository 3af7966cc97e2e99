#include "engine/eval/validation.h"

#include <chrono>

#include "engine/checkpoint/run/run_end.h"
#include "engine/train/hooks/hooks.h"
#include "observe/progress_words.h"

namespace tandem::hooks {
namespace {

using Clock = std::chrono::steady_clock;

class HeldOut : public StepHook {
 public:
  explicit HeldOut(Run& run)
      : run_(run),
        validation_(run.groups, run.config.model, run.config.data, run.config.train, run.source) {
    run.note(validation_.describe());
  }

  // Part of the step: the next forward pass does not wait for them.
  void after_update(Step&) override {
    if (run_.validates()) run_.executor->await_weights();
  }

  void after_step(Step& step) override {
    if (!run_.validates()) return;
    const WorkScope scope("validation", 0);
    const auto begin = Clock::now();
    StepRecord& record = step.record;
    record.validation_loss = validation_.loss(
        record.step, [this](Transformer& model) { run_.ranks->copy_weights(model); },
        run_.request.stop, run_.progress ? &*run_.progress : nullptr);
    record.validates_bytes = validation_.is_text();
    if (record.validation_loss) add_validation(run_.state.control, *record.validation_loss);
    const bool is_lowest =
        record.validation_loss && run_.state.control.validations_since_lowest == 0;
    if (is_lowest && run_.config.train.save_best) run_.write_final();
    run_.start += Clock::now() - begin;  // excluded from training time
  }

 private:
  Run& run_;
  Validation validation_;
};

}  // namespace

Hook make_validation(Run& run) {
  return run.config.train.validate_every > 0 ? std::make_unique<HeldOut>(run) : nullptr;
}

}  // namespace tandem::hooks
