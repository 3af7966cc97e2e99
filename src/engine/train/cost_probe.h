// Costs of a layer and of the ends of a run's model, measured on its ranks at its start.
#pragma once

#include "engine/config/config.h"
#include "engine/parallel/dims.h"
#include "engine/plan/measured_cost.h"

namespace tandem {

/// Runs passes of one layer of each kind that the model has, and of a layer with embedding and
/// head, on random activations, on all ranks at once; sums their gradients over the replicas and
/// updates them. Takes a few such passes, and memory for one layer and the two ends meanwhile. Uses
/// the choices of GEMMs that the run's model has made. CPU ranks. Collective; the same on every
/// rank.
plan::MeasuredCosts measure_costs(const TrainConfig& config, const ParallelGroups& groups);

}  // namespace tandem
