// Causal grouped-query attention over packed sequences, rotary embedding included: q and k are
// passed as projected, and rotated by their position in the sequence while being copied into
// scratch. Row b * seq + p of q, k, v, out is position p of sequence b; a row holds its heads next
// to each other, and rows may be strided. Query head h reads key/value head h / (heads / kv_heads).
// Only a block of queries' scores exists at a time, in a CPU's cache or a GPU's shared memory.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/rope.h"

namespace tandem {

namespace cpu {
class Attention;
}

struct AttentionShape {
  int64_t batch, seq, heads, kv_heads, head_dim;
};

/// Owns the scratch memory of each CPU thread; runs allocate nothing.
class Attention {
 public:
  /// rope must outlive this, cover `shape.seq` positions and be on exec's device. On CPUs: uses the
  /// current number of kernel threads of the constructing thread.
  Attention(const Exec& exec, const AttentionShape& shape, const RopeTable& rope);
  ~Attention();
  /// log_sums: f32 [batch * heads, seq], saved for the backward pass. Others: f32 or bf16, one
  /// dtype.
  void forward(const Exec& exec, const Tensor& q, const Tensor& k, const Tensor& v,
               const Tensor& out, const Tensor& log_sums);
  /// Overwrites dq, dk, dv.
  void backward(const Exec& exec, const Tensor& q, const Tensor& k, const Tensor& v,
                const Tensor& out, const Tensor& log_sums, const Tensor& dout, const Tensor& dq,
                const Tensor& dk, const Tensor& dv);

 private:
  AttentionShape shape_;
  const RopeTable& rope_;
  std::unique_ptr<cpu::Attention> on_cpu_;  // nullptr on a GPU
};

}  // namespace tandem
