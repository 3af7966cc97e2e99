#include "engine/checkpoint/run/resumed_replicas.h"

#include <fmt/format.h>

#include <optional>

#include "engine/checkpoint/checkpoint.h"
#include "tandem/error.h"

namespace tandem {
namespace {

/// Configuration of the newest checkpoint that can be read.
std::optional<TrainConfig> read_newest_config(const std::string& out) {
  for (const std::string& path : list_checkpoints(out)) {
    try {
      return parse_config(read_train_state(path).config, path + "/state.json");
    } catch (const Error&) {
      continue;  // refused when the run is resumed
    }
  }
  return {};
}

}  // namespace

std::string keep_replicas(const std::string& out, TrainConfig& config) {
  if (config.parallel.replicas != 0) return "";
  const std::optional<TrainConfig> before = read_newest_config(out);
  if (!before || before->parallel.logical_replicas() == config.parallel.dp) return "";
  TrainConfig resumed = config;
  resumed.parallel.replicas = before->parallel.logical_replicas();
  try {
    check_config(resumed);
  } catch (const ConfigError& error) {
    return fmt::format(
        "this run began with {} replicas and continues with {}, which sum gradients in another "
        "order: {}",
        resumed.parallel.replicas, config.parallel.dp, error.what());
  }
  config = resumed;
  return "";
}

}  // namespace tandem
