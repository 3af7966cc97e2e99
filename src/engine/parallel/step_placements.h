// Placements of a step's tensors beyond the stages' passes: messages between stages, the gradients'
// reduction, the gradient norm, the updated weights and the losses of all ranks.
#pragma once

#include <span>
#include <vector>

#include "engine/config/config.h"
#include "engine/model/axes.h"
#include "engine/model/parameter.h"
#include "engine/model/placement.h"

namespace tandem {

/// Parameters whose copies are on the ranks that differ on the axes.
struct CopiedParameters {
  std::vector<Parameter> list;
  Axes copies;
};
/// Parameters of all ranks of a stage, and the experts.
std::vector<CopiedParameters> split_experts(std::span<const Parameter> list);

/// Adds what a step computes of the gradients and losses in the table, after its stages. Throws
/// std::logic_error as engine/model/placement.h describes.
void declare_step(std::span<const CopiedParameters> parameters, PlacementTable& table);

/// All tensors of a training step of the job.
PlacementTable step_placements(const ModelConfig& model, const ParallelConfig& parallel);

}  // namespace tandem
