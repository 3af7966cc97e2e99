// Data of a report, as JSON. Internal to the report: includes the JSON library.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <span>
#include <string>

#include "observe/trace.h"

namespace tandem::report {

using Json = nlohmann::ordered_json;

/// {"summary": {run, training, held_out, step_split, sample, omitted}, "series": {step, loss,
/// validation_loss, lr, grad_norm, mfu, aux_loss, expert_imbalance, tokens_per_s}, "experts":
/// LoadMap::json() or null, "ranks": rank_map's or null, "timelines": [...]}. Throws IoError.
Json collect(const std::filesystem::path& dir);

/// One layer of the forward pass (engine/report/layer.h).
/// {"span_us", "ranks": [{"rank", "slices": [{kind, name, begin, end, tile, peer, row}]}],
///  "arrows": [{from, transfer, to, wait}]}
Json layer_timeline(std::span<const RankEvents> ranks);

/// Tables of `summary` as aligned text.
std::string as_text(const Json& summary);

}  // namespace tandem::report
