// Placements of a stage's tensors: parameters, the activations and gradients of its passes, the
// loss, as engine/model/stage.cc, head.cc and the operations of program/ compute them.
#pragma once

#include <optional>
#include <string>

#include "engine/model/layout.h"
#include "engine/model/placement.h"
#include "engine/model/program/declaration.h"

namespace tandem {

/// Placement of a parameter, from its sharding. `pp_rank`: the pipeline rank that holds its stage.
PlacedTensor placed_parameter(const Parameter& parameter, int pp_rank);

/// Tensors that a stage exchanges with others. Those that it receives are as it expects them.
struct StageMessages {
  PlacedTensor output, d_input;                 ///< sent to the stage after and before it
  std::optional<PlacedTensor> input, d_output;  ///< received, unless it has the embedding or head
};

/// Adds the stage's tensors to the table. Throws std::logic_error if an operator cannot consume one
/// (engine/model/placement.h).
StageMessages declare_stage(const ModelConfig& config, const ModelLayout& layout,
                            const StageLayers& layers, PlacementTable& table);

}  // namespace tandem
