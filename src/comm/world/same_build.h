// Check that all ranks of a world run the same program. The exchanged format is the same in all
// versions.
#pragma once

#include <span>

namespace tandem {

struct Build {
  char text[120];
  char allowed;  ///< 1: this rank allows other programs in its world
};

Build this_build();
/// Throws Mismatch, on every rank or on none, unless all builds are equal or all ranks allow
/// others.
void require_same_build(std::span<const Build> ranks);

}  // namespace tandem
