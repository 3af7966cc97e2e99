// Activations saved by a forward pass for its backward pass. Operators, weights and scratch are
// shared by all microbatches of a model; these belong to one, so several may be in flight.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "engine/model/expert_load.h"
#include "engine/model/views.h"
#include "tandem/moe.h"

namespace tandem {

struct ModelContext;

/// Gradients that a branch's backward_weight reads, besides saved activations.
struct WeightPass {
  WeightPass(const ModelContext& context, const BranchLayout& layout);
  Activation dy;       ///< of the output, rows of all ranks
  Activation dhidden;  ///< of `hidden`
};

/// Saved activations of a branch's GEMMs.
struct ProductActivations {
  ProductActivations(const ModelContext& context, const BranchLayout& layout);
  Activation hidden, inner, log_sums;
  std::optional<WeightPass> weight_pass;  ///< if backward passes are split
};

/// Saved activations of a branch's router and experts.
struct RoutedActivations {
  explicit RoutedActivations(const ModelContext& context);
  Activation scores, chosen, weights;
  MoeBatch batch;
};

struct BranchActivations {
  BranchActivations(const ModelContext& context, const BranchLayout& layout);
  Activation x_norm, inverse_rms;
  std::optional<ProductActivations> products;
  std::optional<RoutedActivations> routed;
};

struct HeadActivations {
  explicit HeadActivations(const ModelContext& context);
  Activation x_norm, inverse_rms, logits;
  Activation maxima, sums;  ///< [1, tokens], [2, tokens]; row 0 of sums: sums of exponentials, row
                            ///< 1: the targets' logits
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
  /// Makes the memory of split backward passes at their first.
  void split_backward(const ModelContext& context);
  Activation tokens, targets;  ///< i32 [1, tokens]
  Upload token_upload, target_upload;
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

}  // namespace tandem
