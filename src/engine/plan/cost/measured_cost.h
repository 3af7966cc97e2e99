// Step time of a run from costs that were measured on its ranks: of one layer, and of the model's
// two ends. It is composed as all predictions are (step_cost.h), with factors of 1; bubbles are
// those of the simulated schedule.
#pragma once

#include "engine/config/config.h"
#include "engine/plan/cost/step_cost.h"

namespace tandem::plan {

/// Seconds on a rank, mean of all ranks.
struct LayerCost {
  double forward = 0, backward = 0;  ///< of a microbatch, without waits
  double weight_gradients = 0;       ///< of a microbatch, if they have a pass of their own
  double gaps = 0;                   ///< of both passes, between what is recorded
  double tp = 0, ep = 0;             ///< waits of both passes
  double update = 0;                 ///< of a step: sums of gradients and optimizer, without waits
  double dp = 0;                     ///< waits of a step for replicas, none hidden
  double dp_pass = 0;  ///< waits of a microbatch for them, if its gradients leave at once

  double compute() const { return forward + backward + weight_gradients; }
};
/// All of a cost's terms.
constexpr double LayerCost::*kCostTerms[] = {
    &LayerCost::forward, &LayerCost::backward, &LayerCost::weight_gradients,
    &LayerCost::gaps,    &LayerCost::tp,       &LayerCost::ep,
    &LayerCost::update,  &LayerCost::dp,       &LayerCost::dp_pass};

struct MeasuredCosts {
  LayerCost layer = {};  ///< mean of the model's layers
  LayerCost ends = {};   ///< embedding, last norm, head and loss
  double transfer = 0;   ///< of a microbatch's activations from one pipeline stage to the next
};

/// Step of the configuration's batch on its layout. `fixed` is gaps between kernels, `exposed_pp`
/// 0: the bubble has the transfers between stages. Sums of gradients are hidden by the last
/// backward pass but for those of the last bucket; waits of microbatches for replicas are as
/// measured.
StepTime predict_step(const TrainConfig& config, const MeasuredCosts& costs);

}  // namespace tandem::plan
