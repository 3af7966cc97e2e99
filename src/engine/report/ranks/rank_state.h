// Ranks in their latest steps, for the views of ranks by their groups.
#pragma once

#include <nlohmann/json.hpp>
#include <span>

#include "engine/report/run_goal.h"
#include "engine/report/sent_bytes.h"
#include "observe/rank_records.h"

namespace tandem::report {

/// Mean of a rank's last four frames; zeros without any.
RankFrame latest_frame(const RankHistory& history);

/// {"ranks": {"rank": […], "tp", "cp", "dp", "pp", "host", "work", "phase", "step", "step_ms"},
///  "hosts", "phases": […], "shares": […], "ms": [[…], …]}: of each rank its coordinates, the
///  number of its
/// host, its own work over the median of its stage, the phase in which that exceeds the others'
/// most, the last step and the time of a step; of each phase the mean share of the step, and its
/// milliseconds by rank, without any if it takes no time. And {"ep", "learners", "link":
/// {"bytes_per_s", "latency_s"} or null, "sent": SentBytes::json}.
nlohmann::ordered_json rank_state(std::span<const RankHistory> ranks, const RunGoal& goal,
                                  const SentBytes& sent);

}  // namespace tandem::report
