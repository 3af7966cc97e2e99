// Slow processor of a rank, for tests of what notices it: computation in some phases takes longer.
#pragma once

#include "observe/phases.h"

namespace tandem {

/// From now on spans of computation on the calling thread sleep for these shares of their time, by
/// phase of work: .05 is 5 % longer. Sleeps of less than .3 ms are put off to a later span. All 0:
/// none.
void slow_down(const PhaseTimes& shares);

}  // namespace tandem
