// End, layout, link, size and settings of a run, from its configuration, for its pages.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace tandem::report {

/// Key of the job with another value than its default, both in TOML syntax.
struct RunSetting {
  std::string key, value, usual;
};

/// End of a run: after seconds or tokens if they are not 0, else after steps.
struct RunGoal {
  int64_t steps = 0, tokens = 0;
  double seconds = 0;
  std::string layout;  ///< "tp 2 dp 4"
  int ep = 1;          ///< ranks of a data-parallel group that share a copy of the experts
  int learners = 1;    ///< groups of replicas that exchange every few steps
  /// parallel.link; 0: none.
  double link_bytes_per_s = 0, link_latency_s = 0;
  int64_t parameters = 0;  ///< of the model; 0: not known
  std::vector<RunSetting> settings;

  bool ends_by_steps() const { return seconds == 0 && tokens == 0; }
};
/// Reads the goal from a run's configuration. Throws Error.
using GoalReader = std::function<RunGoal(const std::string& config)>;

}  // namespace tandem::report
