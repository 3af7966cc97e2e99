// Logical replicas of a resumed run.
#pragma once

#include <string>

#include "engine/config/config.h"

namespace tandem {

/// Call before check_config in a run to be resumed: sets parallel.replicas, if it is 0, to that of
/// OUT's newest checkpoint, so that sums keep their order and thus their bits at fewer ranks.
/// Returns a note if this layout cannot keep them, or an empty string.
std::string keep_replicas(const std::string& out, TrainConfig& config);

}  // namespace tandem
