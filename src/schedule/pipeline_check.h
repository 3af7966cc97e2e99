// Rules of a pipeline schedule, checked on the lists that ranks run.
#pragma once

#include <string>
#include <vector>

#include "schedule/pipeline.h"

namespace tandem::schedule {

/// First broken rule as one line; empty if all hold:
/// - every rank has, of every chunk and microbatch, one forward pass and either one backward pass
/// or
///   one backward_input and one backward_weight, and nothing else;
/// - if every rank runs its list in order, no pass waits forever for those that it needs
///   (pipeline_simulation.h), whether later in the list or of ranks that wait in a cycle;
/// - each rank's activations reach `peak_activations` and no more.
std::string find_violation(const PipelineShape& shape,
                           const std::vector<std::vector<PipelineAction>>& actions);

}  // namespace tandem::schedule
