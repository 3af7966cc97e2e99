// Llama-style decoder (RMSNorm, RoPE, grouped-query attention, SwiGLU), forward and backward, on
// the overlap operators: tensor parallel with sequence parallelism. The residual stream is split by
// rows over the TP ranks; column-parallel products are AgGemm, row-parallel ones GemmRs; their
// backward pairs are the reverse (docs/architecture.md).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "engine/model/codec_policy.h"
#include "engine/model/config.h"
#include "engine/model/parameter.h"
#include "tandem/communicator.h"
#include "tandem/overlap.h"
#include "tandem/tensor.h"

namespace tandem {

struct TransformerOptions {
  int64_t batch = 1;         ///< sequences of one microbatch
  int64_t seq = 128;         ///< tokens of each
  DType dtype = DType::f32;  ///< of GEMM operands and activations; parameters stay f32
  OverlapOptions overlap = {};
  /// EP x TP ranks, this one's TP index running fastest, that share the experts; nullptr: `tp`,
  /// each of which then has a part of every expert.
  Communicator* experts = nullptr;
  /// All ranks whose tokens are of one step: they share the counts of what the routers chose.
  /// nullptr: those of `experts`.
  Communicator* step = nullptr;
  CodecPolicy codec = {};  ///< of the forward pass
  /// Called for every router whose choices are counted: scores f32 [own rows, experts], chosen i32
  /// [own rows, top_k]. To compare runs by.
  std::function<void(int layer, const Tensor& scores, const Tensor& chosen)> routed = {};
};

class ExpertLoad;
struct MicrobatchState;

/// What a forward pass leaves for its backward pass: activations and targets of one microbatch.
class Microbatch {
 public:
  ~Microbatch();
  Microbatch(Microbatch&&) noexcept;
  Microbatch& operator=(Microbatch&&) noexcept;

 private:
  friend class Transformer;
  explicit Microbatch(std::unique_ptr<MicrobatchState> state);
  std::unique_ptr<MicrobatchState> state_;
};

class Transformer {
 public:
  /// Collective over `tp`.
  Transformer(Communicator& tp, const ModelConfig& config, const TransformerOptions& options);
  ~Transformer();

  /// The same weights whatever the TP size: each element a function of (seed, name, position).
  void initialize(uint64_t seed);

  /// This rank's parameters and gradients, f32, one flat array each, in order of use (so backward
  /// finishes them back to front). Padding elements between tensors stay zero.
  std::span<float> parameters();
  std::span<float> gradients();
  const std::vector<Parameter>& parameter_list() const;
  /// Call after writing to parameters().
  void parameters_changed();

  /// tokens, targets: batch x seq, target -1 is ignored. Returns the sum over targets of the
  /// cross-entropy in nats, the same on every TP rank.
  double forward(std::span<const int32_t> tokens, std::span<const int32_t> targets);
  /// Adds scale x d(sum)/d(parameter) to gradients(), and the gradients of the routers' auxiliary
  /// loss, unscaled. `ready(begin)` is called each time gradients() from `begin` to the end are
  /// final, with falling `begin`, last with 0. Those of experts stand behind all others, from
  /// experts_begin() on: such a `begin` says so of this part alone, and one below of what is below.
  void backward(float scale, const std::function<void(int64_t begin)>& ready = {});

  /// The same, with activations of the caller's, so that several microbatches may be in flight:
  /// between a forward pass and its backward pass others' may run, in any order that is the same on
  /// all ranks. The two above have a microbatch of the model's own.
  Microbatch make_microbatch() const;
  double forward(std::span<const int32_t> tokens, std::span<const int32_t> targets,
                 Microbatch& microbatch);
  /// Throws InvalidArgument without a forward pass before.
  void backward(Microbatch& microbatch, float scale,
                const std::function<void(int64_t begin)>& ready = {});

  /// Where the experts' part of parameters() begins; its end where there are none.
  int64_t experts_begin() const;
  /// What the routers chose, nullptr without experts. Its counts are those of the last forward pass
  /// (each backward pass uses those of its own)
  /// unless `begin_step` was called: then of all since, until `share_load`, collective over
  /// options.step, has added them up over the ranks. Backward passes do that themselves where it
  /// was not done and the auxiliary loss needs it.
  const ExpertLoad* load() const;
  void begin_step();
  void share_load();
  /// Loss-free balancing: moves the routers' biases by what was shared. Once a step.
  void adjust_router_bias();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tandem
