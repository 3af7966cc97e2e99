// Events of all ranks in one call, for the timeline.
#pragma once

#include <functional>
#include <vector>

#include "observe/trace.h"
#include "tandem/communicator.h"

namespace tandem {

/// Events of this rank's thread and link during `call`, gathered from all ranks, on the clock of
/// rank 0: clocks are measured before and after (comm/rank_clocks.h). Collective.
std::vector<RankEvents> record_call(Communicator& comm, const std::function<void()>& call);

/// Every rank's events, by rank. Collective.
std::vector<RankEvents> gather_events(Communicator& comm, const RankEvents& local);

}  // namespace tandem
