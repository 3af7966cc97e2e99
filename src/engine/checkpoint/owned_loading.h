// Restoring of the state that ranks own, as snapshots have it, to all ranks that hold or use it.
#pragma once

#include "engine/checkpoint/run/trained_ranks.h"
#include "engine/checkpoint/snapshot/snapshot.h"

namespace tandem {

/// Sets weights, optimizer states and residuals from `owned`, each rank's own of the same layout:
/// the bits that load_checkpoint sets from a checkpoint of the same step. Owners send what they own
/// to the other ranks of their groups. Collective.
void load_owned(const TrainedRanks& ranks, const SnapshotGeneration& owned);

}  // namespace tandem
