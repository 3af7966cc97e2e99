// Training under `tandem launch --spares`: continues in this process when another rank is lost.
#pragma once

#include <functional>

#include "comm/rendezvous/membership.h"

namespace tandem {

/// Runs `attempt`, which forms the world, in this process's rank; again, in the launcher's next
/// generation, after an error that the loss of another rank explains. Rethrows other errors. After
/// an error that leaves no use of its GPU the launcher replaces this process.
/// `member`: after its first join; for `attempt` after the last one. Returns whether the last
/// attempt has ended well, or was not needed any more because the result was complete: false if the
/// run has ended while this process had no rank.
bool run_recovering(control::Member& member, const std::function<void()>& attempt);

}  // namespace tandem
