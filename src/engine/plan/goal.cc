#include "engine/plan/goal.h"

#include <utility>
#include <vector>

#include "engine/config/config.h"
#include "engine/parallel/dims.h"
#include "tandem/communicator.h"

namespace tandem {

report::RunGoal read_run_goal(const std::string& text) {
  const TrainConfig config = parse_config(text, "config.toml");
  const EmulatedLink link =
      config.parallel.link.empty() ? EmulatedLink{} : EmulatedLink::parse(config.parallel.link);
  std::vector<report::RunSetting> settings;
  for (const KeyDifference& each : differing_keys(TrainConfig(), config)) {
    settings.push_back({each.key, each.after, each.before});
  }
  return {.steps = config.train.steps,
          .tokens = config.train.tokens,
          .seconds = config.train.seconds,
          .layout = ParallelDims(config.parallel).describe(),
          .ep = int(config.parallel.ep),
          .learners = int(config.parallel.sync.num_learners()),
          .link_bytes_per_s = link.bytes_per_s,
          .link_latency_s = link.latency_s,
          .parameters = config.model.parameters(),
          .settings = std::move(settings)};
}

}  // namespace tandem
