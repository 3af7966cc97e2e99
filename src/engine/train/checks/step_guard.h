// Decision whether a step updates the weights, from its loss and gradient norm. A dropped step
// leaves weights, moments and residuals of error feedback as they were, bit for bit, and its
// samples are consumed.
#pragma once

#include <string>

#include "engine/checkpoint/checkpoint.h"
#include "engine/train/config.h"

namespace tandem {

enum class StepAction : uint8_t {
  update,
  skip,  ///< the step is dropped, the run continues with the next samples
  stop   ///< the step is dropped and its samples are not consumed; the run ends with a checkpoint
};

struct StepVerdict {
  StepAction action = StepAction::update;
  std::string reason;  ///< of skip: "loss is nan, …"; of stop: an error message
};

/// `step`: its number; `lr`: peak learning rate. Records the loss of a step that updates the
/// weights, and counts one that is skipped. A loss is compared with the mean of the accepted ones
/// before it: of all, up to 50, then an exponential one over about 50; if there are at least 10.
/// Equal on all ranks for equal arguments.
StepVerdict judge_step(const RunConfig& train, double lr, ControlState& state, int64_t step,
                       double loss, double grad_norm);

/// Counts the loss of a step that updates the weights to the mean that later ones are compared
/// with.
void accept_loss(ControlState& state, double loss);

/// Verdict on a step without targets, number `in_a_row` of those: skip, up to 1000 of them.
StepVerdict judge_empty_step(int64_t step, int64_t in_a_row);

}  // namespace tandem
