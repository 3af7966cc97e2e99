#include "engine/config/run_control.h"

#include <fmt/format.h>

#include "tandem/error.h"

namespace tandem {

void check_run_control(const TrainConfig& config) {
  const auto& train = config.train;
  if (train.tokens > 0 && train.seconds > 0) {
    throw ConfigError(
        fmt::format("train.tokens is {} and train.seconds is {}: expected one of them",
                    train.tokens, train.seconds));
  }
  if (train.early_stop > 0 && train.validate_every == 0) {
    throw ConfigError(
        fmt::format("train.early_stop is {}: expected train.validate_every above 0, the steps "
                    "between the losses that it compares",
                    train.early_stop));
  }
  if (train.max_loss_spike > 0 && train.max_loss_spike <= 1) {
    throw ConfigError(
        fmt::format("train.max_loss_spike is {}: expected 0, or a ratio above 1 of a loss to the "
                    "mean of those before",
                    train.max_loss_spike));
  }
  if (train.skip_loss_spikes > 0 && train.max_loss_spike == 0) {
    throw ConfigError(
        fmt::format("train.skip_loss_spikes is {}: expected train.max_loss_spike, the ratio from "
                    "which a loss is one",
                    train.skip_loss_spikes));
  }
}

}  // namespace tandem
