#include "engine/train/checks/step_guard.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace tandem {
namespace {

constexpr int64_t kMinLosses = 10, kMeanLosses = 50;

/// Skips a step within its budget. `cause` and `expected`: of the message beyond it.
StepVerdict spend(int64_t budget, int64_t& spent, const char* key, int64_t step,
                  const std::string& cause, const std::string& expected) {
  if (spent < budget) {
    ++spent;
    return {StepAction::skip, cause};
  }
  const std::string after =
      budget == 0 ? "" : fmt::format(", after {} = {} skipped steps", key, budget);
  return {StepAction::stop, fmt::format("step {}: {}{}: {}", step, cause, after, expected)};
}

}  // namespace

StepVerdict judge_step(const RunConfig& train, double lr, ControlState& state, int64_t step,
                       double loss, double grad_norm) {
  if (!std::isfinite(loss) || !std::isfinite(grad_norm)) {
    return spend(train.skip_nonfinite, state.nonfinite_skips, "train.skip_nonfinite", step,
                 fmt::format("loss is {}, gradient norm {}", loss, grad_norm),
                 fmt::format("expected finite numbers (lower optimizer.lr = {})", lr));
  }
  const double max_loss = train.max_loss_spike * state.mean_loss;
  if (train.max_loss_spike > 0 && state.mean_steps >= kMinLosses && loss > max_loss) {
    return spend(train.skip_loss_spikes, state.spike_skips, "train.skip_loss_spikes", step,
                 fmt::format("loss is {}, {:.3g} times the mean of those before", loss,
                             loss / state.mean_loss),
                 fmt::format("expected at most train.max_loss_spike = {}", train.max_loss_spike));
  }
  accept_loss(state, loss);
  return {};
}

void accept_loss(ControlState& state, double loss) {
  state.mean_steps = std::min(state.mean_steps + 1, kMeanLosses);
  state.mean_loss += (loss - state.mean_loss) / double(state.mean_steps);
}

StepVerdict judge_empty_step(int64_t step, int64_t in_a_row) {
  constexpr int64_t kMax = 1000;
  if (in_a_row <= kMax) return {StepAction::skip, "it has no targets: all are masked"};
  return {StepAction::stop,
          fmt::format("step {}: {} steps in a row have no targets, as all are masked: expected "
                      "documents of two tokens or more, or no data.document_mask",
                      step, in_a_row)};
}

}  // namespace tandem
