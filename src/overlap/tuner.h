// Picks a plan by measuring it, collectively: every rank runs the candidates on the real shape,
// interleaved, the slowest rank's time counts, and all ranks make the same choice. The first
// candidate, serial, wins ties, so the choice is never slower than serial. Choices are kept in
// `tuner.json` under the cache directory (rank 0 reads and writes it; one that cannot be read is
// ignored with a warning) and in memory.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "overlap/plan.h"
#include "tandem/communicator.h"

namespace tandem {

/// Collective. `shape` tells apart what may be chosen differently ("m 512 n 64 k 64 f32").
/// `run` runs the operator once with a plan; `plans` is not empty and the same on all ranks.
Plan tune(Communicator& comm, std::string_view op, std::string_view shape,
          std::span<const Plan> plans, const std::function<void(const Plan&)>& run);

/// Drops what is kept in memory, so that the next call reads the file again.
void forget_tuned();

}  // namespace tandem
