// A run's goal, layout and link, from its configuration.
#pragma once

#include <string>

#include "engine/report/run_goal.h"

namespace tandem {

/// `config`: text of OUT/config.toml. Throws ConfigError.
report::RunGoal read_run_goal(const std::string& config);

}  // namespace tandem
