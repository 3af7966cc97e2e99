// Pipeline schedules as data: the order of passes of every pipeline rank. A model is cut into
// stages, consecutive layers; a rank holds one or more of them, its chunks. Runner, simulator,
// timeline and tests read the same lists.
//
// Sends and receives are not in them: a forward pass needs the output of the stage before it, a
// backward pass the gradient from the stage after it, and whoever runs a list transfers both.
// Sources: GPipe (arXiv:1811.06965), 1F1B (arXiv:1806.03377), as in Megatron-LM (arXiv:2104.04473).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tandem::schedule {

enum class PipelineKind : uint8_t {
  gpipe,        ///< all forward passes, then all backward passes
  one_f_one_b,  ///< as few forward passes ahead as fill the pipeline, then one of each in turn
};

struct PipelineShape {
  PipelineKind kind = PipelineKind::one_f_one_b;
  int ranks = 1, microbatches = 1;
  int chunks = 1;  ///< stages of a rank
  int stages() const { return ranks * chunks; }
};

enum class PassKind : uint8_t {
  forward,
  backward,         ///< both of the following
  backward_input,   ///< gradient of the stage's input, which the stage before it waits for
  backward_weight,  ///< gradients of weights, which no other rank waits for
};

/// One pass of a stage of a rank.
struct PipelineAction {
  PassKind pass = PassKind::forward;
  int chunk = 0, microbatch = 0;
  bool operator==(const PipelineAction&) const = default;
};

/// "gpipe", "1f1b"
std::string_view name_of(PipelineKind kind);
/// Throws ConfigError, with all names, for another one.
PipelineKind parse_pipeline_kind(const std::string& name);

/// Throws ConfigError unless the schedule exists for the shape.
void check_pipeline(const PipelineShape& shape);

/// Position in the model of a chunk of a rank, and the rank and chunk at a position.
int stage_of(const PipelineShape& shape, int rank, int chunk);
struct StagePlace {
  int rank = 0, chunk = 0;
};
StagePlace place_of(const PipelineShape& shape, int stage);

/// Passes of a rank in order. Throws as `check_pipeline`.
std::vector<PipelineAction> pipeline_actions(const PipelineShape& shape, int rank);

}  // namespace tandem::schedule
