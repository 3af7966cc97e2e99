// Cross-attention layer of text rows over long visual inputs that are divided among ranks
// (LV-XAttn, arXiv 2502.02406, sections 3 and 4). Visual keys and values stay on the rank of their
// features: with the form `queries` only text rows travel. Keys and values are projected inside the
// layer and are not saved: a backward pass computes them again from the features, which the caller
// has.
//
// Text and features are divided by shard_of(): rank r has rows shard_of(text, size, r) of x and of
// the result, and shard_of(visual, size, r) of the features, of every sequence. Weights are equal
// on all ranks. Construction is collective and chooses the form of each pass as ContextAttention
// does, whose guarantees hold; results have the bits of every form. A rank may have no rows. CPU
// ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "tandem/attention.h"
#include "tandem/communicator.h"
#include "tandem/export.h"
#include "tandem/tensor.h"

namespace tandem {
class CrossAttentionOnRanks;  // internal
class CrossAttentionRows;     // internal
}  // namespace tandem

TANDEM_API_BEGIN
namespace tandem {

struct CrossAttentionShape {
  int64_t batch = 1;     ///< sequences; every rank has rows of each
  int64_t text = 0;      ///< positions of text over all ranks, at least 1
  int64_t visual = 0;    ///< positions of visual features over all ranks, at least 1
  int64_t hidden = 0;    ///< columns of x and of the result
  int64_t features = 0;  ///< columns of visual features
  int64_t heads = 1;     ///< of queries; a multiple of kv_heads
  int64_t kv_heads = 1;
  int64_t head_dim = 0;      ///< even
  DType dtype = DType::f32;  ///< of rows and weights: f32 or bf16
  bool gate = false;         ///< the result is multiplied by tanh of a weight
};

/// Weights of a layer, [output features, input features], or their gradients.
struct CrossAttentionWeights {
  Tensor q;          ///< [heads * head_dim, hidden]
  Tensor k;          ///< [kv_heads * head_dim, features]
  Tensor v;          ///< [kv_heads * head_dim, features]
  Tensor out;        ///< [hidden, heads * head_dim]
  Tensor gate = {};  ///< f32 [1]; empty without CrossAttentionShape::gate
};

/// Saved state of a forward pass: queries, results of attention and log-sums of this rank's text
/// rows. Its size does not depend on the number of visual positions.
class CrossAttentionBatch {
 public:
  CrossAttentionBatch();
  ~CrossAttentionBatch();
  CrossAttentionBatch(CrossAttentionBatch&&) noexcept;
  CrossAttentionBatch& operator=(CrossAttentionBatch&&) noexcept;
  size_t bytes() const;

 private:
  friend class CrossAttention;
  std::unique_ptr<CrossAttentionRows> rows_;
};

class CrossAttention {
 public:
  /// Collective. Throws InvalidArgument for an impossible shape, Mismatch on all ranks, which names
  /// two of them, if ranks differ, Unsupported on GPU ranks, and on all if `strict` forbids what
  /// would run.
  CrossAttention(Communicator& comm, const CrossAttentionShape& shape,
                 const ContextAttentionOptions& options = {});
  ~CrossAttention();
  CrossAttention(CrossAttention&&) noexcept;
  CrossAttention& operator=(CrossAttention&&) noexcept;

  /// Collective: out = [tanh(gate)] x attention(x q^T, visual k^T, visual v^T) out^T. x and out:
  /// [batch * text rows, hidden]; visual: [batch * visual rows, features]; row b * rows + i is row
  /// i of sequence b. Fills `batch`, whose memory is reused. Throws InvalidArgument, which names
  /// the operand, before anything is sent; Timeout, Aborted.
  void forward(const Tensor& x, const Tensor& visual, const CrossAttentionWeights& weights,
               const Tensor& out, CrossAttentionBatch& batch);
  /// Collective: backward pass of the call that filled `batch`, with its x, visual and weights.
  /// Overwrites dx and, unless it is empty, dvisual, of the shapes of x and visual, and the
  /// weights' gradients, in f32 or the shape's dtype (gate: f32): those of this rank's rows, which
  /// the caller sums over ranks, as of any replicated weight. Throws InvalidArgument also for a
  /// batch that no forward pass of this layer filled.
  void backward(const CrossAttentionBatch& batch, const Tensor& dout, const Tensor& x,
                const Tensor& visual, const CrossAttentionWeights& weights, const Tensor& dx,
                const Tensor& dvisual, const CrossAttentionWeights& gradients);

  /// As of ContextAttention.
  std::string_view forward_form() const;
  std::string_view backward_form() const;
  int64_t forward_bytes() const;
  int64_t backward_bytes() const;

 private:
  std::unique_ptr<CrossAttentionOnRanks> impl_;
};

}  // namespace tandem
TANDEM_API_END
