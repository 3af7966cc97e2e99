// Runs that a report compares: their curves, settings and origin. Internal to the report: includes
// the JSON library.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <span>
#include <string>

#include "engine/report/metrics_file.h"
#include "engine/report/run_goal.h"

namespace tandem::report {

constexpr size_t kMaxRuns = 16;  ///< in one report

/// Folder of a run, which names it.
std::string name_of_run(const std::filesystem::path& dir);

/// Throws InvalidArgument for more than kMaxRuns folders or one that is given twice.
void check_runs(std::span<const std::filesystem::path> dirs);

/// One run as the page draws it: {"name": its folder, "series": {step, tokens, elapsed_s, loss, …},
/// "validation_unit", "parameters": null if there is no config.toml, "started": content of
/// started.json or null, "settings": {key: value} that differ from the defaults,
/// "defaults": {key: value} of these}.
nlohmann::ordered_json describe_run(const std::filesystem::path& dir, const Metrics& metrics,
                                    const RunGoal& goal);

/// Keys that not all `runs` with a config.toml have with the same value: [{"key", "values": [of
/// each run, null without config.toml]}].
nlohmann::ordered_json differing_settings(const nlohmann::ordered_json& runs);

}  // namespace tandem::report
