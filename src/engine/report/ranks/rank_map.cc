#include "engine/report/ranks/rank_map.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "engine/report/ranks/rank_rows.h"
#include "engine/report/ranks/stragglers.h"

namespace tandem::report {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kMaxMapRows = 256, kMaxMapColumns = 96, kMaxMapCells = 8192, kMaxSlowLines = 8;
constexpr double kMinPhase = .005;

/// Rows of the map: consecutive ranks [begin, end).
struct MapRow {
  size_t begin, end;
};

std::vector<MapRow> map_rows(size_t ranks) {
  const size_t per_row = (ranks + kMaxMapRows - 1) / kMaxMapRows;
  std::vector<MapRow> rows;
  for (size_t begin = 0; begin < ranks; begin += per_row) {
    rows.push_back({begin, std::min(ranks, begin + per_row)});
  }
  return rows;
}

Json describe_row(std::span<const RankHistory> ranks, const MapRow& row) {
  const RankPosition& position = ranks[row.begin].position;
  const bool is_one = row.end - row.begin == 1;
  return {{"name",
           is_one ? fmt::format("rank {}", position.rank)
                  : fmt::format("ranks {} to {}", position.rank, ranks[row.end - 1].position.rank)},
          {"position", (is_one ? "" : "from ") + describe(position)},
          {"stage", position.pp}};
}

using Value = std::function<double(const RankFrame&)>;

/// [column][row], milliseconds.
Json cells(const std::vector<RankRow>& columns, const std::vector<MapRow>& rows,
           const Value& value) {
  Json all = Json::array();
  for (const RankRow& column : columns) {
    Json of_column = Json::array();
    for (const MapRow& row : rows) {
      double largest = 0;
      for (size_t i = row.begin; i < row.end; ++i)
        largest = std::max(largest, value(column.frames[i]));
      of_column.push_back(std::round(largest * 1e3) / 1e3);
    }
    all.push_back(std::move(of_column));
  }
  return all;
}

/// Mean share of the steps' time.
double share_of(const std::vector<RankRow>& columns, size_t phase) {
  double ms = 0, all = 0;
  for (const RankRow& column : columns) {
    for (const RankFrame& frame : column.frames) ms += frame.phases[phase], all += frame.step_ms;
  }
  return all > 0 ? ms / all : 0;
}

}  // namespace

Json rank_map(std::span<const RankHistory> ranks) {
  std::vector<const RankHistory*> all;
  for (const RankHistory& history : ranks) all.push_back(&history);
  if (all.empty()) return nullptr;
  const std::vector<MapRow> rows = map_rows(ranks.size());
  const std::vector<RankRow> columns =
      align(all, std::clamp<size_t>(kMaxMapCells / rows.size(), 24, kMaxMapColumns));
  if (columns.empty()) return nullptr;
  Json names = Json::array(), steps = Json::array(), views = Json::array(), slow = Json::array();
  for (const MapRow& row : rows) names.push_back(describe_row(ranks, row));
  for (const RankRow& column : columns) steps.push_back(column.first);
  views.push_back(
      {{"name", "own work"}, {"wait", false}, {"ms", cells(columns, rows, total_work)}});
  for (size_t phase = 0; phase < kPhases; ++phase) {
    if (share_of(columns, phase) < kMinPhase) continue;
    views.push_back(
        {{"name", name_of(Phase(phase))},
         {"wait", !is_work(Phase(phase))},
         {"ms", cells(columns, rows, [=](const RankFrame& f) { return f.phases[phase]; })}});
  }
  for (const Straggler& straggler : find_stragglers(ranks)) {
    if (slow.size() == kMaxSlowLines) break;
    const auto of_rank = std::ranges::find(ranks, straggler.rank,
                                           [](const RankHistory& h) { return h.position.rank; });
    slow.push_back(describe(straggler, of_rank->position));
  }
  return {{"rows", std::move(names)},
          {"steps", std::move(steps)},
          {"last", columns.back().last},
          {"step_ms", cells(columns, rows, [](const RankFrame& f) { return f.step_ms; })},
          {"views", std::move(views)},
          {"slow", std::move(slow)}};
}

}  // namespace tandem::report
