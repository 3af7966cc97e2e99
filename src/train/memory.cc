#include "train/memory.h"

#include <fmt/format.h>

#include "core/machine.h"
#include "tandem/error.h"

namespace tandem {

// All f32. Each replica has its weights and gradients; the replicas share one pair of moments.
double training_bytes(const TrainConfig& config) {
  return 4.0 * double(config.model.parameters()) * double(2 * config.parallel.dp + 2);
}

void check_memory(const TrainConfig& config) {
  const int ranks = int(config.parallel.tp * config.parallel.dp);
  const double bytes = training_bytes(config) * ranks_here(ranks) / ranks;
  const auto machine = double(this_machine().memory_bytes);
  if (machine == 0 || bytes <= machine) return;
  throw ConfigError(fmt::format(
      "a model of {:.4g} M parameters on tp {} x dp {} ranks: its weights, gradients and moments "
      "need {:.3g} GB: expected at most this machine's {:.3g} GB",
      double(config.model.parameters()) / 1e6, config.parallel.tp, config.parallel.dp, bytes / 1e9,
      machine / 1e9));
}

}  // namespace tandem
