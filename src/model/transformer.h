// Llama-style decoder (RMSNorm, RoPE, grouped-query attention, SwiGLU), forward and backward, on
// the overlap operators: tensor parallel with sequence parallelism. The residual stream is split by
// rows over the TP ranks; column-parallel products are AgGemm, row-parallel ones GemmRs; their
// backward pairs are the reverse (docs/architecture.md).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "model/config.h"
#include "tandem/communicator.h"
#include "tandem/overlap.h"
#include "tandem/tensor.h"

namespace tandem {

/// One named tensor of the model as it stands on disk, and the part of it this rank holds.
struct Parameter {
  std::string name;            ///< Hugging Face name, "model.layers.0.self_attn.q_proj.weight"
  std::vector<int64_t> shape;  ///< whole
  int shard_dim = -1;          ///< dimension split over TP, -1: the same on every rank
  int64_t begin = 0;           ///< this rank's range of shard_dim: [begin, begin + count)
  int64_t count = 0;
  int64_t offset = 0;      ///< of the local view's first element in parameters()
  int64_t row_stride = 0;  ///< elements between rows of the local view (2-D), 1-D: unused
  bool decay = true;       ///< weight decay applies (matrices, not norms)
};

struct TransformerOptions {
  int64_t batch = 1;         ///< sequences of one microbatch
  int64_t seq = 128;         ///< tokens of each
  DType dtype = DType::f32;  ///< of GEMM operands and activations; parameters stay f32
  OverlapOptions overlap = {};
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
  /// Adds scale x d(sum)/d(parameter) to gradients(). `ready(begin)` is called each time
  /// gradients() from `begin` to the end are final, with falling `begin`, last with 0.
  void backward(float scale, const std::function<void(int64_t begin)>& ready = {});

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tandem
