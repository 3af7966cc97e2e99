// Data of a report, as JSON. Internal to the report: includes the JSON library.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <span>
#include <string>

#include "engine/report/run_goal.h"
#include "observe/trace.h"

namespace tandem::report {

using Json = nlohmann::ordered_json;

/// {"summary": {run, training, held_out, step_split, sample, omitted}, "series": {step, loss,
/// validation_loss, lr, grad_norm, mfu, aux_loss, expert_imbalance, tokens_per_s}, "experts":
/// LoadMap::json() or null, "ranks": rank_map's or null, "groups": rank_state's or null,
/// "timelines":
/// [...]}. `read_goal`: reads config.toml, if both are there. Throws IoError.
Json collect(const std::filesystem::path& dir, const GoalReader& read_goal);

/// One layer of the forward pass (engine/report/trace/layer.h).
/// {"span_us", "ranks": [{"rank", "slices": [{kind, name, begin, end, tile, peer, row}]}],
///  "arrows": [{from, transfer, to, wait}]}
Json layer_timeline(std::span<const RankEvents> ranks);

/// Tables of `summary` as aligned text.
std::string as_text(const Json& summary);

}  // namespace tandem::report
