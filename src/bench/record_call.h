// One call's events of all ranks, for the timeline.
#pragma once

#include <functional>
#include <vector>

#include "observe/trace.h"
#include "tandem/communicator.h"

namespace tandem {

/// Collective: what this rank's thread and link do in `call`, gathered from all ranks, which leave
/// a barrier first.
std::vector<RankEvents> record_call(Communicator& comm, const std::function<void()>& call);

/// Collective: every rank's events, by rank.
std::vector<RankEvents> gather_events(Communicator& comm, const RankEvents& mine);

}  // namespace tandem
