// Slow processor of a rank, for tests of what notices it: computation in some phases takes longer.
// And its end in the midst of a step.
#pragma once

#include <optional>
#include <string>

#include "observe/phases.h"

namespace tandem {

/// From now on spans of computation on the calling thread sleep for these shares of their time, by
/// phase of work: .05 is 5 % longer. Sleeps of less than .3 ms are put off to a later span. All 0:
/// none.
void slow_down(const PhaseTimes& shares);

/// Kills the process by SIGKILL when a span of the calling thread has ended in this phase and with
/// this name; without one of them, any. Further calls add such spans.
void kill_after_span(std::optional<Phase> phase, const std::string& name);
/// Takes all of the thread back.
void cancel_kills();

}  // namespace tandem
