// Collective reading of a checkpoint or of a model: every rank reads its shard of the full tensors
// on disk, so any layout can resume from a checkpoint of any other.
#pragma once

#include <string>

#include "engine/checkpoint/run/trained_ranks.h"

namespace tandem {

/// Loads weights, moments and error feedback residuals of a verified checkpoint. Residuals belong
/// to one rank of one layout: with another layout they start at zero. Returns a note about them, or
/// an empty string. Collective.
std::string load_checkpoint(const TrainedRanks& ranks, const std::string& path);
/// Loads the weights of a verified model in `folder`; moments and residuals stay zero. Collective.
void load_model(const TrainedRanks& ranks, const std::string& folder);

}  // namespace tandem
