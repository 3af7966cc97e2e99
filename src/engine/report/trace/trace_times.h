// Time breakdown of the ranks of a trace.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "observe/trace.h"

namespace tandem {

/// Times of one rank, averaged over its multiprocessors if it has any; events of none (a copy
/// engine's transfers) count in full. Concurrent events of a kind count once: a wait only while no
/// computation runs, a transfer whenever it runs.
struct RankTimes {
  int rank = 0, processors = 0;
  double span_us = 0;  ///< from the trace's begin to the rank's last event
  double gemm_us = 0, compute_us = 0, exposed_wait_us = 0, transfer_us = 0;
};
std::vector<RankTimes> rank_times(std::span<const RankEvents> ranks);

/// Aligned table of them, in percent of the span.
std::string as_text(std::span<const RankTimes> times);

}  // namespace tandem
