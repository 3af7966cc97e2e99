// End of a run: after its steps, its tokens or its time, or early, if the validation loss no longer
// falls.
#pragma once

#include <string>

#include "engine/checkpoint/checkpoint.h"
#include "engine/train/config.h"

namespace tandem {

/// Why no step is left, such as "it has made 6, train.steps is 6"; empty: there are steps left.
std::string describe_end(const TrainState& state, const RunConfig& train);

/// Records a validation loss for train.early_stop. One that is not finite is not below any other.
void add_validation(ControlState& state, double loss);

}  // namespace tandem
