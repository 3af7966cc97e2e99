// Pipeline schedules as data: the order of passes of every pipeline rank. A model is cut into
// stages, consecutive layers; a rank holds one or more of them, its chunks. Runner, simulator,
// timeline and tests read the same lists.
//
// Sends and receives are not in them: a forward pass needs the output of the stage before it, a
// backward pass the gradient from the stage after it, and whoever runs a list transfers both.
// With p ranks, m microbatches and v chunks per rank:
//
// clang-format off
// | schedule    | chunks | stages of rank r  | microbatches  | peak_activations of rank r       |
// | ----------- | ------ | ----------------- | ------------- | -------------------------------- |
// | gpipe       | 1      | r                 | any           | m                                |
// | 1f1b        | 1      | r                 | any           | min(m, p-r)                      |
// | interleaved | v >= 2 | r, p+r, 2p+r, ... | multiple of p | min(v m, 2(p-r-1) + (v-1) p + 1) |
// | zb-h1       | 1      | r                 | any           | min(m, p)                        |
// | zb-v        | 2      | r, 2p-1-r         | any           | min(m, 2p-r-1) + min(m, r+1)     |
// | dualpipe-v  | 2      | r, 2p-1-r         | at least 2p   | 2p+1                             |
// clang-format on
//
// Sources: GPipe (arXiv:1811.06965), 1F1B (arXiv:1806.03377) and interleaved 1F1B as in Megatron-LM
// (arXiv:2104.04473), ZB-H1 (arXiv:2401.10241), ZB-V, also called V-ZB (arXiv:2405.15362), the
// V-shaped half of DualPipe (arXiv:2412.19437).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tandem::schedule {

enum class PipelineKind : uint8_t {
  gpipe,        ///< all forward passes, then all backward passes
  one_f_one_b,  ///< as few forward passes ahead as fill the pipeline, then one of each in turn
  interleaved,  ///< 1F1B with `chunks` stages per rank, a round of `ranks` microbatches at a time
  zb_h1,        ///< 1F1B whose weight gradients wait until the rank has nothing else to do
  zb_v,         ///< V shape: the first and the last stage are on rank 0; split backward passes
  dualpipe_v,   ///< V shape, with a forward and a backward pass of two microbatches side by side
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

/// "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"
std::string_view name_of(PipelineKind kind);
/// Throws ConfigError, with all names, for another one.
PipelineKind parse_pipeline_kind(const std::string& name);

std::vector<PipelineKind> pipeline_kinds();
/// Whether backward passes compute weight gradients in passes of their own.
constexpr bool splits_backward(PipelineKind kind) {
  return kind == PipelineKind::zb_h1 || kind == PipelineKind::zb_v ||
         kind == PipelineKind::dualpipe_v;
}
/// Fewest chunks per rank that the schedule exists for.
int min_chunks(PipelineKind kind);

/// Throws ConfigError unless the schedule exists for the shape.
void check_pipeline(const PipelineShape& shape);

/// Position in the model of a chunk of a rank, and the rank and chunk at a position.
int stage_of(const PipelineShape& shape, int rank, int chunk);
struct StagePosition {
  int rank = 0, chunk = 0;
};
StagePosition position_of(const PipelineShape& shape, int stage);

/// Passes of a rank in order. Throws as `check_pipeline`. Two adjacent passes of `dualpipe_v`,
/// forward and backward of different microbatches and chunks, may run concurrently.
std::vector<PipelineAction> pipeline_actions(const PipelineShape& shape, int rank);
/// Passes of all ranks.
std::vector<std::vector<PipelineAction>> pipeline_actions(const PipelineShape& shape);

/// Max number of activations that a rank stores, each of one stage and microbatch, from the begin
/// of its forward pass to the end of its backward pass, or of its backward_weight. The table above
/// has the formulas.
int peak_activations(const PipelineShape& shape, int rank);

}  // namespace tandem::schedule
