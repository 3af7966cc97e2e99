// Where the ranks of a trace spent their time, in figures.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "observe/trace.h"

namespace tandem {

/// One rank's time, averaged over its multiprocessors where it has any; what belongs to none of
/// them (a copy engine's transfers) counts whole. What happens at once counts once: a wait only
/// while nothing computes, a transfer whenever it runs.
struct RankTimes {
  int rank = 0, processors = 0;
  double span_us = 0;  ///< from the trace's begin to the rank's last event
  double gemm_us = 0, compute_us = 0, exposed_wait_us = 0, transfer_us = 0;
};
std::vector<RankTimes> rank_times(std::span<const RankEvents> ranks);

/// The same as an aligned table, in percent of the span.
std::string as_text(std::span<const RankTimes> times);

}  // namespace tandem
