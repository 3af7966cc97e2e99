#include "engine/checkpoint/run/run_end.h"

#include <fmt/format.h>

#include <cmath>

namespace tandem {

std::string describe_end(const TrainState& state, const RunConfig& train) {
  const ControlState& control = state.control;
  if (train.seconds > 0 && state.elapsed_s >= train.seconds) {
    return fmt::format("it has trained for {:.1f} s, train.seconds is {}", state.elapsed_s,
                       train.seconds);
  }
  if (train.tokens > 0 && control.tokens >= train.tokens) {
    return fmt::format("it has consumed {} tokens, train.tokens is {}", control.tokens,
                       train.tokens);
  }
  if (train.ends_by_steps() && state.step >= train.steps) {
    return fmt::format("it has made {}, train.steps is {}", state.step, train.steps);
  }
  if (train.early_stop > 0 && control.validations_since_lowest >= train.early_stop) {
    return fmt::format(
        "none of the last {} validation losses is below {:.4f}, train.early_stop is {}",
        control.validations_since_lowest, control.lowest_validation_loss, train.early_stop);
  }
  return "";
}

void add_validation(ControlState& state, double loss) {
  const bool is_first = state.validations_since_lowest < 0;
  if (std::isfinite(loss) && (is_first || loss < state.lowest_validation_loss)) {
    state.lowest_validation_loss = loss;
    state.validations_since_lowest = 0;
  } else if (!is_first) {
    ++state.validations_since_lowest;
  }
}

}  // namespace tandem
