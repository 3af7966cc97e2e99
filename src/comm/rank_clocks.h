// Clocks of all ranks against that of rank 0, for traces of several hosts.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "observe/clock_offset.h"
#include "tandem/communicator.h"

namespace tandem {

/// Clock of the calling rank's recorder in nanoseconds.
int64_t clock_ns();

/// Collective. Offsets of every rank's clock against that of rank 0, indexed by rank, by 16 rounds
/// of a barrier: they work on every transport, and each round bounds all ranks at once.
std::vector<ClockOffset> rank_clocks(Communicator& world,
                                     const std::function<int64_t()>& now = clock_ns);

}  // namespace tandem
