// Activations saved by a forward pass for its backward pass. Operators, weights and scratch are
// shared by all microbatches of a model; these belong to one, so several may be in flight.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/model/expert_load.h"
#include "engine/model/views.h"
#include "tandem/moe.h"

namespace tandem {

struct MicrobatchState;
struct ModelContext;

/// Operands of a branch's backward_weight: gradients and, if its layer recomputes them, the
/// activations that they are multiplied with.
struct WeightPass {
  WeightPass(const ModelContext& context, const BranchLayout& layout, bool has_activations);
  size_t bytes() const;
  Activation dy;       ///< of the output, rows of all ranks
  Activation dhidden;  ///< of `hidden`
  std::optional<Activation> x_norm, inner;
};

/// Activations of a branch between its forward and its backward pass. Those that its layer
/// recomputes (recompute.h) are in memory of the stage, the others in the microbatch's.
struct BranchActivations {
  program::Values values;
  MoeBatch* experts = nullptr;              ///< if it has them
  Tensor document_starts;                   ///< the microbatch's, or empty
  Tensor padded_tokens;                     ///< of local rows, i32; without data: no padding
  std::unique_ptr<WeightPass> weight_pass;  ///< from backward_input to backward_weight

  size_t bytes() const;
  std::vector<Activation> memory;
  std::unique_ptr<MoeBatch> expert_memory;
};

/// Memory of split backward passes, reused by other layers and microbatches: there is as much as
/// passes are pending at once.
class WeightPasses {
 public:
  /// Before backward_input: sets the weight_pass of all branches, which their recomputed operands
  /// are then in.
  void begin(const ModelContext& context, MicrobatchState& microbatch);
  /// After backward_weight.
  void end(const ModelContext& context, MicrobatchState& microbatch, size_t branch);
  /// Bytes of all passes, pending or not.
  size_t bytes() const { return bytes_; }

 private:
  void begin(const ModelContext& context, MicrobatchState& microbatch, size_t branch);
  using Free = std::vector<std::unique_ptr<WeightPass>>;
  Free& free_of(const ModelContext& context, size_t branch);
  std::array<std::array<Free, 2>, kBranchKinds> free_;  // [..][has activations]
  size_t bytes_ = 0;
};

/// Memory that the layers of a stage recompute activations in, and of its split backward passes.
struct RecomputedActivations {
  /// Empty if no layer recomputes.
  explicit RecomputedActivations(const ModelContext& context);
  size_t bytes() const;
  std::array<BranchActivations, kBranchKinds> branches;  ///< by branch_kind, with their scratch
  std::optional<Activation> residual;                    ///< between the two branches of a layer
  WeightPasses weight_passes;
  std::array<std::vector<Activation>, kBranchKinds> scratch;
};

/// Logits of `rows` rows of all ranks.
struct HeadLogits {
  HeadLogits(const ModelContext& context, int64_t rows);
  size_t bytes() const { return logits->bytes() + maxima->bytes() + sums->bytes(); }
  Activation logits;
  Activation maxima, sums;  ///< [1, rows], [2, rows]; row 0 of sums: sums of exponentials, row 1:
                            ///< the targets' logits
};

/// The logits are those of the microbatch, or none with head_rows.
struct HeadActivations : HeadLogits {
  explicit HeadActivations(const ModelContext& context);
  size_t bytes() const;
  Activation x_norm, inverse_rms;
  std::optional<Activation> dlogits;  ///< if the head's weight gradient is left to a later pass
};

/// Expert load of the routers' choices: of this rank's tokens until it is shared.
struct CountedLoad {
  ExpertLoad load;
  bool is_shared = false;  ///< counts cover all ranks
  void clear() { load.clear(), is_shared = false; }
};

struct MicrobatchState {
  /// `owns_input`: with memory for residuals[0], else it is set before every forward pass.
  MicrobatchState(const ModelContext& context, bool owns_input);
  /// Bytes of its memory; of experts, of what their passes have needed so far.
  size_t bytes() const;
  Activation tokens, targets;  ///< i32 [1, tokens]
  Upload token_upload, target_upload;
  std::optional<Activation> document_starts;  ///< i32 [1, batch x seq]
  std::optional<Upload> document_upload;
  bool is_filled = false;           ///< by a forward pass
  bool has_weight_pass = false;     ///< backward_input was run, backward_weight was not
  bool has_embedding_pass = false;  ///< a backward pass was run, backward_embedding was not
  std::vector<Tensor> residuals;    ///< before each branch, and after the last
  std::vector<BranchActivations> branches;
  std::optional<HeadActivations> head;
  /// Load of this microbatch, or of the whole step between begin_step and share_load. nullptr
  /// without experts.
  std::shared_ptr<CountedLoad> load;
  std::vector<Activation> residual_memory;
};

/// Uploads the tokens of a microbatch if its stage `embeds` them, or if it routes rows of which
/// some are padding.
void set_tokens(const ModelContext& context, std::span<const int32_t> tokens, bool embeds,
                MicrobatchState& microbatch);
/// Implements Stage::set_documents.
void set_documents(const ModelContext& context, std::span<const int32_t> starts,
                   MicrobatchState& microbatch);

}  // namespace tandem
