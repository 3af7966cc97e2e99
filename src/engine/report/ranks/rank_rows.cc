#include "engine/report/ranks/rank_rows.h"

#include <algorithm>
#include <map>

namespace tandem::report {
namespace {

/// Steps at which frames of all ranks end.
std::vector<int64_t> common_ends(std::span<const RankHistory* const> ranks) {
  std::map<int64_t, size_t> ranks_at;
  for (const RankHistory* history : ranks) {
    for (const RankFrame& frame : history->frames) ++ranks_at[frame.step];
  }
  std::vector<int64_t> ends;
  for (const auto& [step, count] : ranks_at) {
    if (count == ranks.size()) ends.push_back(step);
  }
  return ends;
}

}  // namespace

double total_work(const RankFrame& frame) {
  double ms = 0;
  for (size_t i = 0; i < kPhases; ++i) ms += is_work(Phase(i)) ? frame.phases[i] : 0;
  return ms;
}

void merge_frame(RankFrame& to, const RankFrame& frame) {
  const double steps = to.steps + frame.steps, before = to.steps / steps;
  const double share = frame.steps / steps;
  to.step_ms = to.step_ms * before + frame.step_ms * share;
  for (size_t i = 0; i < kPhases; ++i) {
    to.phases[i] = to.phases[i] * before + frame.phases[i] * share;
  }
  to.step = frame.step;
  to.steps += frame.steps;
}

std::vector<RankRow> align(std::span<const RankHistory* const> ranks, size_t max_rows) {
  const std::vector<int64_t> ends = common_ends(ranks);
  const size_t merged = std::max<size_t>(1, (ends.size() + max_rows - 1) / max_rows);
  std::vector<size_t> at(ranks.size());  // next frame of each rank
  std::vector<RankRow> rows;
  for (size_t i = merged - 1; i < ends.size(); i += merged) {
    RankRow row;
    bool is_complete = true;
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      RankFrame mean;
      mean.steps = 0;
      const auto& frames = ranks[rank]->frames;
      for (; at[rank] < frames.size() && frames[at[rank]].step <= ends[i]; ++at[rank]) {
        merge_frame(mean, frames[at[rank]]);
      }
      is_complete = is_complete && mean.steps > 0 && mean.step == ends[i];
      row.frames.push_back(mean);
    }
    if (!is_complete) continue;
    row.last = ends[i];
    row.first = row.last - std::ranges::min(row.frames, {}, &RankFrame::steps).steps + 1;
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace tandem::report
