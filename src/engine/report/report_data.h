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

/// {"summary": {run, training, held_out, step_split, receipts, overlap, sample, omitted; with
/// others compared:
/// {"runs": [training and name of each], "settings": differing_settings()}}, "runs": describe_run()
/// of this and the others, "samples": [{"step", "text"}], "experts": LoadMap::json() or null,
/// "ranks": rank_map's or null, "groups": rank_state's or null, "timelines": [...]}. `read_goal`:
/// reads config.toml, if both are there. `others`: folders of the runs to compare with. Throws
/// IoError.
Json collect(const std::filesystem::path& dir, const GoalReader& read_goal,
             std::span<const std::filesystem::path> others);

/// One layer of the forward pass (engine/report/trace/layer.h).
/// {"span_us", "ranks": [{"rank", "slices": [{kind, name, begin, end, tile, peer, row}]}],
///  "arrows": [{from, transfer, to, wait}]}
Json layer_timeline(std::span<const RankEvents> ranks);

/// Tables of `summary` as aligned text.
std::string as_text(const Json& summary);

}  // namespace tandem::report
