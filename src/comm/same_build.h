// Whether all ranks of a world run the same program. What is exchanged keeps its form in all
// versions.
#pragma once

#include <span>

#include "tandem/communicator.h"

namespace tandem {

struct Build {
  char text[120];
  char allowed;  ///< other programs in this world are
};

Build this_build();
/// Throws Mismatch, on every rank or on none, unless all are the same or all ranks allow others.
void require_same_build(std::span<const Build> ranks);
/// Collective: of a communicator's ranks.
void require_same_build(Communicator& comm);

}  // namespace tandem
