#include <utility>

#include "engine/train/hooks/hooks.h"
#include "observe/recorder.h"

namespace tandem::hooks {
namespace {

class Checkpoints : public StepHook {
 public:
  explicit Checkpoints(Run& run) : run_(run) {}

  void after_passes(Step& step) override { step.sums.running = run_.checkpoints->running(); }
  void after_sums(Step& step) override {
    requested_ = requested_ || step.sums.save;
    running_ = step.sums.running;
  }
  void before_update(Step&) override { run_.checkpoints->before_update(); }

  void after_update(Step& step) override {
    if (run_.checkpoints->is_due(run_.state)) run_.executor->await_slices();
    if (run_.checkpoints->snapshot_bytes() > 0) {
      step.record.checkpoint_ms = run_.checkpoints->take_blocked_ms();
    }
  }

  void after_step(Step& step) override {
    if (!step.is_agreed) return;
    const ScopedSpan span(SpanKind::checkpoint, "checkpoint");
    const bool requested = std::exchange(requested_, false);
    if (requested) run_.executor->await_weights();
    if (run_.checkpoints->is_due(run_.state)) {
      run_.executor->await_slices();  // reports of learners may make it due since `after_update`
      run_.executor->progress();      // the first weights leave meanwhile
    }
    run_.checkpoints->after_step(run_.state, requested, running_);
    run_.note_warnings();
  }

 private:
  Run& run_;
  bool requested_ = false;  // in a step that was dropped, of the next one
  RunCheckpoints::Running running_;
};

}  // namespace

Hook make_checkpoints(Run& run) {
  return std::make_unique<Checkpoints>(run);
}

}  // namespace tandem::hooks
