// Consecutive layers of a Llama-style decoder (RMSNorm, RoPE, grouped-query attention, SwiGLU),
// with or without its two ends, forward and backward, on the overlap operators: tensor parallel
// with sequence parallelism. The residual stream is row-sharded over the TP ranks; column-parallel
// GEMMs are AgGemm, row-parallel ones GemmRs; their backward passes are the reverse
// (docs/dev/architecture.md).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/exec.h"
#include "engine/model/codec_policy.h"
#include "engine/model/config.h"
#include "engine/model/parameter.h"
#include "engine/model/recompute.h"
#include "tandem/communicator.h"
#include "tandem/moe.h"
#include "tandem/overlap.h"
#include "tandem/tensor.h"

namespace tandem {

/// Gradients that leave as soon as a backward pass has finished them (ZeRO-2), so that layers share
/// memory (engine/model/gradient_memory.h): all but the experts', and the experts'. Without
/// `every_pass` they leave after the last pass of each of several logical replicas, and layers
/// share no memory.
struct GradientWindow {
  bool dense = false, experts = false;
  bool every_pass = true;
  int64_t bucket_elements = 0;
};

class ContextOperator;
struct ContextBackward;
struct ContextForward;
/// Passes of attention on context-parallel ranks in place of the operator's own, which they may
/// call; empty: those. For comparing runs.
struct ContextPasses {
  std::function<void(ContextOperator& attention, const ContextForward& call)> forward = {};
  std::function<void(ContextOperator& attention, const ContextBackward& call)> backward = {};
};

/// Maps the mode in which a pass writes the gradients of a layer's experts (add after the first
/// microbatch, else store); empty: the mode itself. For comparing runs.
using ExpertGradients = std::function<WeightGradients(int moe_layer, WeightGradients mode)>;

struct TransformerOptions {
  int64_t batch = 1;         ///< sequences per microbatch
  int64_t seq = 128;         ///< tokens per sequence, of all ranks of `context`
  DType dtype = DType::f32;  ///< GEMM operands and activations
  /// Gradients of the weights, and of the residual stream: f32, or `dtype`. A step's gradients are
  /// rounded after each microbatch.
  DType gradient_dtype = DType::f32, residual_gradient = DType::f32;
  /// Quantizes the operands of dense layers' GEMMs to e4m3 (quantized_operands.h). `dtype` is bf16
  /// then: of activations and all other GEMMs. Weight gradients: on one tensor-parallel rank.
  bool fp8 = false;
  bool fp8_weight_gradients = true;
  bool fp8_experts = false;  ///< also of the experts; on CPU ranks
  /// If false, codes are the values rounded to e4m3: a control, on CPU ranks.
  bool fp8_scales = true;
  /// If false, weights of another dtype are not kept in f32, except norms and routers: owners of
  /// the optimizer state hold them (engine/parallel/sharded/sharded_optimizer.h).
  bool f32_weights = true;
  OverlapOptions overlap = {};
  /// EP x TP ranks that share the experts, TP index fastest; nullptr: `tp`, whose ranks then shard
  /// every expert. On GPU ranks its calls are enqueued on `tp`'s stream from now on, so it must be
  /// destroyed before `tp`.
  Communicator* experts = nullptr;
  /// Ranks that divide every sequence (schedule/context.h); nullptr: this one has all rows.
  Communicator* context = nullptr;
  /// Communicators along which expert counts are summed in turn: together all ranks of a step.
  /// Empty: `experts`.
  std::vector<Communicator*> step = {};
  /// Rows of all tensor-parallel ranks whose logits the head computes at once, with loss and
  /// gradients, in the backward pass: a divisor of their rows and a multiple of these ranks; 0:
  /// all, in the forward pass. Not where the embedding is tied to another stage's.
  int64_t head_rows = 0;
  GradientWindow gradient_window = {};
  CodecPolicy codec = {};  ///< for the forward pass
  RecomputedLayers recompute = {};
  MoeSave moe_save = MoeSave::sorted;
  bool documents = false;     ///< set_documents may be called; GPUs choose their kernels by it
  bool deterministic = true;  ///< on GPUs false may be faster, with other last bits every time
  /// Called for every router whose choices are counted: scores f32 [local rows, experts], chosen
  /// i32 [local rows, top_k], on the rank's device. For comparing runs.
  std::function<void(int layer, const Tensor& scores, const Tensor& chosen)> routed = {};
  ContextPasses context_passes = {};
  ExpertGradients expert_gradients = {};
};

/// Callback with a range of the flat arrays.
using FlatRangeCallback = std::function<void(FlatRange)>;

/// Layers [first, first + count) of a model; with the embedding before them or the head after them.
struct StageLayers {
  int64_t first = 0;
  int64_t count = -1;  ///< -1: all from `first`
  bool embedding = true, head = true;
  int pp_rank = 0;  ///< pipeline rank that holds the stage
};

class GradientMemory;
struct ExpertCounts;
struct MicrobatchState;
struct WeightViews;

/// Saved activations and targets of one microbatch, from its forward to its backward pass.
class Microbatch {
 public:
  ~Microbatch();
  Microbatch(Microbatch&&) noexcept;
  Microbatch& operator=(Microbatch&&) noexcept;
  /// Bytes of its memory, which grows in the first passes.
  size_t bytes() const;

 private:
  friend class Stage;
  explicit Microbatch(std::unique_ptr<MicrobatchState> state);
  std::unique_ptr<MicrobatchState> state_;
};

class Stage {
 public:
  /// Collective over `tp`. On GPU ranks all work is on the stream that `tp` has now. Throws
  /// ConfigError if the model does not have the layers.
  Stage(Communicator& tp, const ModelConfig& config, const TransformerOptions& options,
        const StageLayers& layers);
  ~Stage();

  /// Initializes the weights independently of TP size and stages: each element depends on (seed,
  /// name, position). They are in parameter_staging() then, too.
  void initialize(uint64_t seed);

  /// This rank's parameters, f32, and gradients, options.gradient_dtype, [elements] on its device,
  /// one flat array each, in order of use (backward finishes them back to front). Padding between
  /// tensors stays zero.
  /// Without options.f32_weights, parameters() of another dtype has no data; with a gradient
  /// window, gradients() has none.
  Tensor parameters() const;
  Tensor gradients() const;
  const Exec& exec() const;
  /// All parameters of the model, the same names and order at every stage; those of other stages
  /// are absent.
  const std::vector<Parameter>& parameter_list() const;
  GradientMemory& gradient_memory();
  /// Weights as kept on this rank.
  const WeightViews& weights() const;
  /// Memory to write new weights to, f32 [elements]: parameters(), or gradients() in f32 if that
  /// has no data, or else memory of the host until end_staging().
  Tensor parameter_staging();
  void end_staging();
  /// Must be called after writing to parameter_staging(), or to a range of it, before the next
  /// pass.
  void parameters_changed();
  void parameters_changed(FlatRange range);
  /// Writes the weights as passes read them, f32 [elements].
  void read_parameters(const Tensor& to) const;
  /// Offset of the first expert parameter in parameters(), and of the end of the last one: the same
  /// if there are none.
  int64_t experts_begin() const;
  int64_t experts_end() const;
  /// Positions of [0, experts_begin()) among the whole model's, and those of [experts_begin(),
  /// experts_end()).
  FlatWindow dense_window() const;
  FlatWindow experts_window() const;
  /// Range in parameters() of an embedding that is tied to the head of another stage. It is a
  /// parameter of the stage with the head; the one with the embedding has a copy.
  std::optional<FlatRange> tied_embedding() const;
  /// Embedding in the dtype of GEMMs, [local rows, hidden].
  Tensor embedding() const;

  /// Whether the embedding is before its layers.
  bool has_embedding() const;

  /// Several microbatches may be in flight: forward and backward passes of different ones may
  /// interleave in any order that is the same on all ranks. Collective if the stage has experts.
  Microbatch make_microbatch() const;
  /// Microbatch without memory for its input, which `set_input` sets before every forward pass.
  Microbatch make_microbatch_without_input() const;
  /// Bytes of memory that all microbatches share, which grows in the first passes: recomputed
  /// activations, operands of split backward passes, the logits' gradient.
  size_t shared_activation_bytes() const;
  /// Shape, dtype and device of the residual stream: f32 [local rows, hidden], without data.
  Tensor residual() const;
  /// Residual stream before the first and after the last layer. A stage
  /// without embedding reads its input, written before `forward`, until the backward pass or
  /// backward_input is complete; without head its output is the next stage's input, and unchanged
  /// until the microbatch's next forward pass.
  Tensor input(const Microbatch& microbatch) const;
  Tensor output(const Microbatch& microbatch) const;
  /// Stage without embedding: memory of the input. Throws InvalidArgument for another shape.
  void set_input(Microbatch& microbatch, const Tensor& input) const;
  /// Without head the gradient of the output, written before a backward
  /// pass, which leaves the gradient of the input here.
  Tensor residual_gradient();
  /// Stage without head: memory of residual_gradient() from now on. Throws as `set_input`.
  void set_residual_gradient(const Tensor& gradient);

  /// Divides the sequences into documents, which attention does not cross, from the next forward
  /// pass on. `starts`, batch x seq: the position in its sequence at which each position's document
  /// begins. Throws InvalidArgument for others.
  void set_documents(std::span<const int32_t> starts, Microbatch& microbatch) const;

  /// tokens, targets: batch x seq, of which ranks of a context-parallel group take their rows.
  /// Token -1 is padding: its row is zeros at first, goes to no expert and counts in no expert's
  /// load; target -1 is ignored. Without embedding, tokens may be empty if none is padding. Returns
  /// the cross-entropy summed over targets in nats, the same on every TP rank; 0 without head. The
  /// losses of enqueued passes that were not taken are included.
  double forward(std::span<const int32_t> tokens, std::span<const int32_t> targets,
                 Microbatch& microbatch) {
    enqueue_forward(tokens, targets, microbatch);
    return take_loss();
  }
  /// Forward pass without waiting for the loss: `take_loss` returns the sum since the last call,
  /// with head_rows that of backward passes.
  void enqueue_forward(std::span<const int32_t> tokens, std::span<const int32_t> targets,
                       Microbatch& microbatch);
  double take_loss();
  /// Adds scale x d(sum)/d(parameter) to gradients(), and the unscaled gradients of the routers'
  /// auxiliary loss; the first pass of a step replaces what was there before. Calls `ready(range)`
  /// each time a range of gradients() is final: all elements once, in the same order on all ranks,
  /// experts (from experts_begin()) separately from all others. Throws InvalidArgument without a
  /// preceding forward pass; on a GPU one serves a single backward pass.
  void backward(Microbatch& microbatch, float scale, const FlatRangeCallback& ready = {});
  /// Backward in two passes, with equal bits: `backward_input` leaves the input's gradient, and
  /// `backward_weight`, any number of other passes later, completes gradients(). The weight
  /// gradients of GEMMs in attention and MLP are computed in the second, all others in the first.
  /// In between other passes of the microbatch throw InvalidArgument.
  void backward_input(Microbatch& microbatch, float scale);
  void backward_weight(Microbatch& microbatch, const FlatRangeCallback& ready = {});
  /// Stage with the head of a tied embedding in another stage: adds the gradients of its two uses,
  /// the head's first. `dx`: what the other stage's backward pass left in residual_gradient(). The
  /// backward passes of this stage compute and report all gradients but this one. Until it has run
  /// other passes of the microbatch but backward_weight throw InvalidArgument.
  void backward_embedding(Microbatch& microbatch, const Tensor& dx,
                          const FlatRangeCallback& ready = {});

  /// Called by the next forward pass with each range of parameters() before their use, in order,
  /// experts separately; the range may be written to then, as may that of the working copy.
  void await_parameters(FlatRangeCallback await);
  /// From now on passes call `progress` between the operators of a branch, on the calling thread,
  /// so that communication that needs it need not wait for the branch's end.
  void run_between_operators(std::function<void()> progress);

  /// Rows of the experts, none without experts: those of the last forward pass (each backward pass
  /// uses its own forward pass's), which backward passes sum over the ranks if the auxiliary loss
  /// needs them. After `begin_step`: rows of all forward passes since, until `share_load`,
  /// collective over options.step, sums them over the ranks. Blocks until they have been counted.
  std::optional<ExpertCounts> expert_counts() const;
  /// Begins a step: the first backward pass after it replaces the gradients. `aux_losses`: if 1,
  /// one auxiliary loss covers all forward passes until `share_load`; else each of so many
  /// microbatches has its own, and the step's is their mean.
  void begin_step(int64_t aux_losses = 1);
  void share_load();
  /// Auxiliary loss of all layers, of the rows that expert_counts() covers. Valid after
  /// `share_load` or a backward pass. Blocks until it has been computed.
  double aux_loss() const;
  /// Loss-free balancing: adjusts the routers' biases by the shared counts. Called once per step.
  void adjust_router_bias();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tandem
