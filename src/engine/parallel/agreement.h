// Checks across ranks beyond equal command lines: ranks may run in different working directories.
#pragma once

#include <string>
#include <string_view>

#include "tandem/communicator.h"

namespace tandem {

/// Throws Mismatch, on every rank, naming `what` and the resolved `path` of two ranks, unless all
/// ranks of one machine resolve it to the same location. It need not exist yet. Ranks of different
/// machines are not compared, as their file systems may differ. Collective.
void require_same_location(Communicator& world, std::string_view what, const std::string& path);

}  // namespace tandem
