// Records of several ranks as a table: rows are steps, columns are ranks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "observe/rank_records.h"

namespace tandem::report {

struct RankRow {
  int64_t first = 0, last = 0;    ///< steps
  std::vector<RankFrame> frames;  ///< means over the steps, by rank
};

/// Milliseconds of a frame's own work, in all phases.
double total_work(const RankFrame& frame);

/// Adds the steps of `frame` to the mean `to`, which ends before them.
void merge_frame(RankFrame& to, const RankFrame& frame);

/// Rows between the steps at which frames of all ranks end, at most `max_rows`: if there are more,
/// each has several of them. Steps that a rank has no frame of are left out.
std::vector<RankRow> align(std::span<const RankHistory* const> ranks, size_t max_rows);

}  // namespace tandem::report
