// Residual branch in training: the operators shared by all branches of its kind, its forward pass
// (computation: engine/model/program/) and its backward pass.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/model/branch_attention.h"
#include "engine/model/branch_gemm.h"
#include "engine/model/expert_load.h"
#include "engine/model/gradient_memory.h"
#include "engine/model/microbatch.h"
#include "engine/model/program/frame.h"
#include "engine/model/rotary.h"
#include "overlap/moe/activation.h"
#include "overlap/moe/quantization.h"
#include "schedule/context.h"
#include "tandem/communicator.h"
#include "tandem/moe.h"
#include "tandem/overlap.h"

namespace tandem {

/// State shared by all components of one Transformer.
struct ModelContext {
  ModelContext(Communicator& communicator, const ModelConfig& model,
               const TransformerOptions& transformer_options, const StageLayers& layers);
  ModelContext(const ModelContext&) = delete;  // expert_quantization refers to it
  ModelContext& operator=(const ModelContext&) = delete;
  Communicator& tp;
  Exec exec;
  Communicator& experts;  ///< EP x TP ranks
  ModelConfig config;
  TransformerOptions options;
  StageLayers layers;
  ModelLayout layout;
  Weights weights;
  GradientMemory gradients;
  schedule::ContextRows sequence_rows;  ///< of each sequence, here; without options.context all
  int64_t tokens;                       ///< batch * sequence_rows.count()
  std::unique_ptr<QuantizedOperands> quantized;  ///< with options.fp8, else nullptr
  MoeQuantization expert_quantization;           ///< of experts on CPU ranks, with options.fp8
  Shard local_rows;                              ///< this rank's rows of the residual stream
  RopeTables rope;
  Activation norm_partial_sums;  ///< scratch of the norms' backward passes
  /// Gradient of the residual stream rounded to the dtype of GEMMs, [local rows, hidden]; without
  /// rows if it has that dtype.
  Activation rounded_gradient;
  /// Scratch of write_gradient, f32; empty if gradients are in f32.
  Memory gradient_sum;

  /// Values of this rank's rows, of those of whole sequences, [batch x seq]; valid until the next
  /// call.
  std::span<const int32_t> take_rows(std::span<const int32_t> of_sequences);

  /// Called between operators of long passes; may be empty.
  std::function<void()> between_operators;

  std::vector<int32_t> taken_rows;  ///< of take_rows
  /// Made last.
  std::unique_ptr<RecomputedActivations> recomputed;

  /// Layout of the whole model on this rank.
  ModelLayout whole_layout() const;
  void run_between_operators() const {
    if (between_operators) between_operators();
  }
  /// Quantized weights are of one step.
  void begin_step() {
    gradients.begin_step();
    weights_changed();
  }
  void weights_changed() const {
    if (quantized) quantized->weights_changed();
  }
  /// GradientMemory::begin_write of `gradients`.
  bool adds_gradient(int64_t offset) { return gradients.begin_write(offset); }
  /// Begins both gradients of a branch's experts, which are written together.
  WeightGradients begin_experts(const BranchLayout& l) {
    const bool adds = adds_gradient(l.experts_in.offset);
    const WeightGradients mode =
        adds_gradient(l.experts_out.offset) && adds ? WeightGradients::add : WeightGradients::store;
    return options.expert_gradients ? options.expert_gradients(l.moe_layer, mode) : mode;
  }
  /// Calls write(values, adds) with f32 memory to which a gradient is added, or which it replaces
  /// unless `adds`; gradient(m) of another dtype is then rounded from it.
  void write_gradient(const WeightMatrix& m,
                      const std::function<void(const Tensor& values, bool adds)>& write);
  /// values = dy^T x all-gather(x), or += if `adds`; `wgrad` has a value if there are several
  /// ranks.
  void multiply_gradient(std::optional<AgWgrad>& wgrad, const Tensor& x, const Tensor& dy,
                         const Tensor& values, bool adds);
  /// multiply_gradient of gradient(m).
  void write_weight_gradient(std::optional<AgWgrad>& wgrad, const Tensor& x, const Tensor& dy,
                             const WeightMatrix& m);
  /// gradient(m) (+)= dy^T x of e4m3 columns; false, and nothing is done, unless they are
  /// quantized.
  bool write_quantized_gradient(const Tensor& x, const Tensor& dy, const WeightMatrix& m);
  /// Whether branches' weight gradients are of e4m3. Several ranks gather rows as they multiply.
  bool quantizes_weight_gradients() const {
    return options.fp8 && options.fp8_weight_gradients && tp.size() == 1;
  }
  /// gradient(m) for a caller that adds to it.
  Tensor gradient_to_add(const WeightMatrix& m);
  Tensor gradient(const WeightMatrix& m) const;
  /// gradient(m) (+)= term, f32.
  void add_gradient(const Tensor& term, const WeightMatrix& m);
  /// gradient(m) (+)= the sum over the TP ranks of `term`, f32, which it replaces by the sum.
  void sum_gradient(const Tensor& term, const WeightMatrix& m);
  /// GPU operators have no f32 output of bf16 operands.
  DType logits_dtype() const { return exec.on_gpu() ? options.dtype : DType::f32; }
  /// Whether GEMMs read the gradient of the residual stream from `rounded_gradient`.
  bool rounds_gradient() const { return options.dtype != options.residual_gradient; }
  /// The residual stream's gradient dx as GEMMs read it.
  const Tensor& rounded(const Tensor& dx) const {
    return rounds_gradient() ? *rounded_gradient : dx;
  }
  /// Memory on the rank's device.
  Activation make(DType dtype, int64_t rows, int64_t columns) const {
    return Activation(dtype, rows, columns, exec.device);
  }
};

/// Shape of the GEMM from the gradient of a column-parallel matrix's output, `rows` over all ranks,
/// to that of its input.
GemmRs::Shape dgrad_shape(const ModelContext& context, const WeightMatrix& m, int64_t rows);
/// That GEMM. Collective.
GemmRs make_dgrad(ModelContext& context, const WeightMatrix& m, int64_t rows);
/// AgWgrad of a column-parallel matrix; none for one rank, which has the rows. Collective.
std::optional<AgWgrad> make_wgrad(ModelContext& context, const WeightMatrix& m, int64_t rows);

/// GEMMs and attention of a branch, with backward scratch. Branches run one at a time. Construction
/// is collective.
struct BranchProducts {
  BranchProducts(ModelContext& context, const BranchLayout& layout);
  /// Nullptr if the branch has none. Made first: on a GPU it loads kernels, which must not wait for
  /// those of an operator that wait for peers.
  std::unique_ptr<BranchAttention> attention;
  BranchGemm<AgGemm> in;
  BranchGemm<GemmRs> out;
  /// dgrad of a row-parallel GEMM; its gathered input also serves the wgrad
  BranchGemm<AgGemm> out_dgrad;
  BranchGemm<GemmRs> in_dgrad;
  std::optional<AgWgrad> in_wgrad;  ///< if there are several ranks
  Activation residual, d_act, dhidden, d_x_norm;
  /// Gradient of the rows of `in` that every rank has, before a pass, f32; none for one rank.
  Activation d_whole_before;
};

/// Experts shared by all MoE branches, and the router's scratch. Construction is collective.
struct BranchExperts {
  BranchExperts(ModelContext& context, const BranchLayout& layout);
  BranchExperts(const BranchExperts&) = delete;  // `layer` refers to `activation`
  BranchExperts& operator=(const BranchExperts&) = delete;
  /// Memory of their batches, by agreement of the ranks: a pass that ran out of it would end.
  void prepare(std::span<const BranchActivations> branches);
  Activation routed, d_x_norm, x_norm, logits, dlogits, dweights, drouter, d_bias;
  std::optional<MoeActivation> activation;  ///< of the layer
  MoeLayer layer;                           ///< made last, as its kernels wait for peers

 private:
  /// Runs the router's GEMMs once, on zeros: on a GPU their algorithms are then chosen before
  /// kernels wait for peers, and saved with those of the AgGemm made next.
  Communicator& with_router_gemms(ModelContext& context, const BranchLayout& layout);
};

/// Activations of a microbatch. Collective if the stage has experts; else they are nullptr.
std::unique_ptr<MicrobatchState> make_state(const ModelContext& context, BranchExperts* experts,
                                            bool owns_input);

/// Norm of the residual stream after a branch, saved for the next branch or the head; the stream,
/// rounded, for a branch without norm.
struct NextNorm {
  NormWeight weight;
  Tensor x_norm, inverse_rms;
};

class Branch {
 public:
  /// `products` and `experts` are nullptr if the layout has none.
  Branch(ModelContext& context, BranchProducts* products, BranchExperts* experts,
         const BranchLayout& layout);
  /// Norm before this branch.
  NextNorm norm(const BranchActivations& saved) const;
  void normalize(const Tensor& x, const BranchActivations& saved) const;
  /// y = x + branch(x), both f32 [local rows, hidden], then the norm of y, if any. x, whose norm
  /// must be in `saved`, must stay valid until the backward pass. Adds the router's expert counts
  /// to `load` unless it is nullptr. y without dimensions: computes only what backward reads, and
  /// no norm.
  void forward(const Tensor& x, const Tensor& y, const BranchActivations& saved, ExpertLoad* load,
               const std::optional<NextNorm>& next);
  /// In: dx = gradient of y; out: gradient of x; the same, rounded, in context.rounded_gradient, if
  /// it has rows. `dnorm` += this rank's contribution to the norm's
  /// gradient. `saved`: saved activations. `balance`: gradient of the auxiliary loss with respect
  /// to one row's probabilities, f32 [experts]; without data: none. `is_split`: leaves the weight
  /// gradients of the products to backward_weight, for which `saved` then has memory.
  void backward(const Tensor& x, const Tensor& dx, const Tensor& dnorm,
                const BranchActivations& saved, const Tensor& balance, bool is_split);
  void backward_weight(const BranchActivations& saved);
  /// Computes what a forward pass with Recompute::selective did not save.
  void recompute_unsaved(const Tensor& x, const BranchActivations& saved);

 private:
  struct Run;
  LayerView view() const;
  /// Whether a shared expert runs while rows are sent to the routed ones.
  bool overlaps_shared_expert() const;

  ModelContext& context_;
  BranchProducts* products_;
  BranchExperts* experts_;
  BranchLayout layout_;
};

}  // namespace tandem
