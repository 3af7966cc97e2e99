#include "engine/config/batch_rampup.h"

#include <fmt/format.h>

#include <algorithm>

#include "engine/config/replicas.h"
#include "tandem/error.h"

namespace tandem {

int64_t batch_at(const TrainConfig& config, int64_t sample) {
  const auto& train = config.train;
  if (train.batch_start == 0 || sample >= train.batch_rampup_samples) return train.batch;
  const int64_t increments = (train.batch - train.batch_start) / train.batch_increment;
  const double done = double(sample) * double(increments) / double(train.batch_rampup_samples);
  return train.batch_start + std::min(int64_t(done), increments) * train.batch_increment;
}

void check_batch_rampup(const TrainConfig& config) {
  const auto& train = config.train;
  if (train.batch_start == 0) {
    if (train.batch_increment == 0 && train.batch_rampup_samples == 0) return;
    throw ConfigError(
        "train.batch_start is 0, no ramp-up: expected train.batch_increment and "
        "train.batch_rampup_samples to be 0");
  }
  if (train.batch_start >= train.batch) {
    throw ConfigError(fmt::format("train.batch_start is {}: expected less than train.batch = {}",
                                  train.batch_start, train.batch));
  }
  if (train.batch_rampup_samples == 0) {
    throw ConfigError(
        "train.batch_rampup_samples is 0: expected the samples over which the batch grows");
  }
  if (train.microbatch == 0) {
    throw ConfigError(
        "train.microbatch is 0: expected its size, which stays the same while the batch grows");
  }
  if (train.batch_increment == 0 ||
      (train.batch - train.batch_start) % train.batch_increment != 0) {
    throw ConfigError(fmt::format(
        "train.batch_increment is {}: expected a divisor of train.batch - train.batch_start = {}",
        train.batch_increment, train.batch - train.batch_start));
  }
  const int64_t unit = train.microbatch * logical_replicas(config);
  const auto check_unit = [&](const char* key, int64_t value) {
    if (value % unit == 0) return;
    throw ConfigError(fmt::format("{} is {}: expected a multiple of train.microbatch x {} = {}",
                                  key, value, replicas_key(config), unit));
  };
  check_unit("train.batch_start", train.batch_start);
  check_unit("train.batch_increment", train.batch_increment);
}

}  // namespace tandem
