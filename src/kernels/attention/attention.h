// Causal grouped-query attention over packed sequences, rotary embedding included: q and k are
// passed as projected, and rotated by their position in the sequence. Row b * seq + p of q, k, v,
// out is position p of sequence b; a row holds its heads next to each other, and rows may be
// strided. Query head h reads key/value head h / (heads / kv_heads). Only a block of queries'
// scores exists at a time, in a CPU's cache or a GPU's shared memory; but cuDNN's deterministic
// backward pass keeps score gradients of some heads.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "kernels/rope.h"

namespace tandem {

namespace cpu {
class Attention;
}
namespace gpu {
class FusedAttention;
}

struct AttentionShape {
  int64_t batch, seq, heads, kv_heads, head_dim;
  /// Scores x, before the mask, are softcap x tanh(x / softcap) (Gemma 2, arXiv 2408.00118); 0: x.
  double softcap = 0;
};

/// Keys that queries read, besides being causal.
struct AttentionMask {
  AttentionMask(int64_t window_ = 0, const Tensor& document_starts_ = {})
      : window(window_), document_starts(document_starts_) {}
  /// A query reads its own key and up to window - 1 before it (sliding-window attention, arXiv
  /// 2310.06825, as Hugging Face's sliding_window); 0: all before it.
  int64_t window;
  /// i32 [1, batch * seq], the position in its sequence at which each position's document begins: a
  /// query reads keys of its own document, and positions count from its begin. Empty: a sequence is
  /// one document. On CPUs a document gives the bits that it gives in a batch without others, and
  /// costs the same; GPUs run their simple kernels where the fused form is cuDNN's.
  Tensor document_starts;
};

/// Tensors of every run, known in advance.
struct AttentionRows {
  DType dtype;
  int64_t qkv_stride;         ///< elements between rows of q, k, v, dq, dk and dv
  int64_t out_stride;         ///< elements between rows of out and dout
  bool deterministic = true;  ///< backward gives the same bits every time; false may be faster
  std::vector<int64_t> windows{0};  ///< windows of all runs
  bool documents = false;           ///< runs have document starts, which cuDNN does not take
};

/// Owns its scratch memory, on a CPU that of each thread; runs allocate nothing.
class Attention {
 public:
  /// rope must outlive this, cover `shape.seq` positions and be on exec's device. On CPUs: uses the
  /// current number of kernel threads of the constructing thread. On a GPU throws Unsupported for a
  /// soft cap.
  ///
  /// With `rows`, which all runs must then have, a GPU uses for bf16 the kernels of
  /// kernels/cuda/hopper_attention.h if it can, or cuDNN; else its simple kernels. cuDNN's are
  /// loaded here, which waits for all kernels of the device. Both run only on exec's stream.
  Attention(const Exec& exec, const AttentionShape& shape, const RopeTable& rope,
            const std::optional<AttentionRows>& rows = {});
  ~Attention();
  /// log_sums: f32 [batch * heads, seq], saved for the backward pass. Others: f32 or bf16, one
  /// dtype. Both forms for bf16 rotate q and k in place, which saves a copy of them.
  /// In cuDNN's form throws InvalidArgument for a window that is not one of its rows'.
  void forward(const Exec& exec, const Tensor& q, const Tensor& k, const Tensor& v,
               const Tensor& out, const Tensor& log_sums, const AttentionMask& mask = {});
  /// Second forward pass, with q and k as forward left them: the same bits in out and log_sums.
  void forward_again(const Exec& exec, const Tensor& q, const Tensor& k, const Tensor& v,
                     const Tensor& out, const Tensor& log_sums, const AttentionMask& mask = {});
  /// Takes q and k as forward left them, and the same mask. Overwrites dq, dk, dv.
  void backward(const Exec& exec, const Tensor& q, const Tensor& k, const Tensor& v,
                const Tensor& out, const Tensor& log_sums, const Tensor& dout, const Tensor& dq,
                const Tensor& dk, const Tensor& dv, const AttentionMask& mask = {});

 private:
  gpu::FusedAttention* fused(const AttentionMask& mask) const;

  AttentionShape shape_;
  const RopeTable& rope_;
  bool takes_documents_ = false;                // in its fused form
  std::unique_ptr<cpu::Attention> on_cpu_;      // nullptr on a GPU
  std::unique_ptr<gpu::FusedAttention> fused_;  // nullptr for the simple kernels
};

}  // namespace tandem
