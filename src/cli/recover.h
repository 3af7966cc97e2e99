// Training under `tandem launch --spares`: continues in this process when another rank is lost.
#pragma once

#include <functional>

#include "comm/rendezvous/membership.h"

namespace tandem::cli {

/// Runs `attempt`, which forms the world, in this process's rank; again, in the launcher's next
/// generation, after an error that the loss of another rank explains. Rethrows other errors.
/// `attempt`: called with whether it continues with what an earlier one has left in the output
/// folder. `member`: after its first join.
void run_recovering(control::Member& member, const std::function<void(bool resumes)>& attempt);

}  // namespace tandem::cli
