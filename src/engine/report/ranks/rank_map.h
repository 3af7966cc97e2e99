// Heat map of ranks and steps for the report's page.
#pragma once

#include <nlohmann/json.hpp>
#include <span>

#include "observe/rank_records.h"

namespace tandem::report {

/// From histories, by rank; null without a step that all ranks have. Columns are consecutive steps,
/// rows are ranks, or of a large run groups of consecutive ranks with the longest time of each.
///   {"rows": [{"name", "position", "stage"}], "steps": first of each column, "last": step,
///    "step_ms": [column][row], "views": [{"name", "wait", "ms": [column][row]}], "slow": lines}
/// The first view is the ranks' own work; the others are phases that take at least .5 % of a step.
nlohmann::ordered_json rank_map(std::span<const RankHistory> ranks);

}  // namespace tandem::report
