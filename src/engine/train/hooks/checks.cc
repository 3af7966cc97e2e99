#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <vector>

#include "engine/parallel/collective_check.h"
#include "engine/train/checks/state_checks.h"
#include "engine/train/hooks/hooks.h"
#include "tandem/error.h"

namespace tandem::hooks {
namespace {

class Checks : public StepHook {
 public:
  explicit Checks(Run& run)
      : run_(run), checks_(run.groups, run.config.check, *run.ranks, run.request.out) {}

  void after_passes(Step& step) override {
    checks_.compute_again(step.number, step.compute, step.result);
    step.sums.checks = checks_.sums(step.number);
  }

  void after_sums(Step& step) override {
    findings_ = checks_.find(step.sums.checks, step.number);
    for (const CheckFinding& finding : findings_) run_.note("warning: " + describe(finding));
    run_.ending.corrupt = !findings_.empty() && checks_.stops();
  }

  void before_end() override {
    if (run_.ending.corrupt) end();
  }

 private:
  /// Saves nothing, and sets the state of the last step aside.
  [[noreturn]] void end() {
    std::string saved;
    try {
      saved = run_.checkpoints->set_aside(run_.state.step);
    } catch (const Aborted&) {  // by a rank that is done with it, as all are then
      if (!checks_.replaces()) throw;
    }
    run_.note_warnings();
    const std::string finding = describe(findings_.front());
    if (checks_.replaces() && run_.request.leave_corrupt) {
      const std::vector<int> suspects = suspected_ranks(findings_);
      run_.note(fmt::format("warning: to be replaced: {}; the state after step {} is not used",
                            name_ranks(suspects), run_.state.step));
      if (!std::ranges::binary_search(suspects, run_.world.rank())) {
        throw Aborted(suspects[0], finding);
      }
      run_.request.leave_corrupt();
    }
    throw Error(fmt::format("{}; ended after step {}, whose weights are not saved; {}", finding,
                            run_.state.step, saved));
  }

  Run& run_;
  StateChecks checks_;
  std::vector<CheckFinding> findings_;  // of the last step
};

}  // namespace

Hook make_checks(Run& run) {
  return std::make_unique<Checks>(run);
}

}  // namespace tandem::hooks
