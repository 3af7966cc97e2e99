// Costs of a layer and of the ends of a run's model, measured on its ranks at its start.
#pragma once

#include "engine/config/config.h"
#include "engine/parallel/dims.h"
#include "engine/plan/cost/measured_cost.h"

namespace tandem {

/// Runs passes of the layers of each kind that the model has, in rows as long as a rank's, and of
/// such a row with embedding and head, on random activations, on all ranks at once, with split
/// backward passes where the schedule has them; sums their gradients over the replicas and updates
/// them. Takes a few such passes of two microbatches, and meanwhile memory for a row, at most 256
/// MB of state or one layer, and the two ends. Uses the choices of GEMMs that the run's model has
/// made. CPU ranks. Collective; the same on every rank.
plan::MeasuredCosts measure_costs(const TrainConfig& config, const ParallelGroups& groups);

}  // namespace tandem
