// Causal grouped-query attention over packed sequences, rotary embedding included: q and k are
// passed as projected, and rotated by their position in the sequence while being copied into
// scratch. Row b * seq + p of q, k, v, out is position p of sequence b; a row holds its heads next
// to each other, and rows may be strided. Query head h reads key/value head h / (heads / kv_heads).
// Only kQueryBlock rows of scores exist at a time, and they stay in the cache.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/rope.h"
#include "tandem/tensor.h"

namespace tandem {

struct AttentionShape {
  int64_t batch, seq, heads, kv_heads, head_dim;
};

/// Owns the scratch memory of each kernel thread; runs allocate nothing.
class Attention {
 public:
  /// rope must outlive this and cover `shape.seq` positions. Uses the current number of kernel
  /// threads of the constructing thread.
  Attention(const AttentionShape& shape, const RopeTable& rope);
  ~Attention();
  /// log_sums: f32 [batch * heads, seq], saved for the backward pass. Others: f32 or bf16, one
  /// dtype.
  void forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
               const Tensor& log_sums);
  /// Overwrites dq, dk, dv.
  void backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                const Tensor& log_sums, const Tensor& dout, const Tensor& dq, const Tensor& dk,
                const Tensor& dv);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tandem
