#include "core/system/process/clock.h"
#include "engine/train/hooks/hooks.h"

namespace tandem::hooks {
namespace {

class Requests : public StepHook {
 public:
  explicit Requests(const Run& run) : run_(run) {}

  void before_step(Step&) override {
    if (run_.request.before_step) run_.request.before_step(run_.state.step);
  }

  void after_passes(Step& step) override {
    const TrainRequest& request = run_.request;
    const double limit_s = run_.config.train.max_seconds;
    const bool is_late =
        limit_s > 0 && run_.world.rank() == 0 && seconds_since(request.started) >= limit_s;
    step.sums.stop = is_late || (request.stop && *request.stop);
    step.sums.save = request.saves && request.saves->exchange(0) > 0;
  }

 private:
  const Run& run_;
};

}  // namespace

Hook make_requests(Run& run) {
  return std::make_unique<Requests>(run);
}

}  // namespace tandem::hooks
