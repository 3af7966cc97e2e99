// Changes of the step time within a run, and what the records say of their
// cause.
#pragma once

#include <span>
#include <string>

#include "engine/report/ranks/rank_rows.h"

namespace tandem::report {

/// Compares the first quarter of the rows, after a tenth that warms up, with the last one. A change
/// of 3 % or more is explained by what changed most. Work that grew alike in every phase is that of
/// a lower clock or, if it varies more than before, of other programs; else the phase is named, and
/// the rank or host if others have not changed. Time in no phase is that of launches. Waits that
/// grew without any rank's work are those of ranks that start apart, or of links.
std::string describe_drift(std::span<const RankHistory> ranks, std::span<const RankRow> rows);

}  // namespace tandem::report
