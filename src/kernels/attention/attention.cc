#include "kernels/attention/attention.h"

#include "kernels/attention/simple_attention.h"
#include "kernels/cpu/attention.h"
#include "kernels/cuda/cudnn/attention.h"
#include "kernels/cuda/hopper_attention.h"
#include "kernels/cuda/kernels.h"
#include "tandem/error.h"

namespace tandem {

Attention::Attention(const Exec& exec, const AttentionShape& shape, const RopeTable& rope,
                     const std::optional<AttentionRows>& rows)
    : shape_(shape),
      rope_(rope),
      on_cpu_(exec.on_gpu() ? nullptr : std::make_unique<cpu::Attention>(shape, rope)) {
  if (!exec.on_gpu()) return;
  if (shape.softcap > 0) throw Unsupported("attention with a soft cap: expected CPU ranks");
  gpu::check_attention(shape);
  if (!rows || shape.batch * shape.seq * shape.heads == 0) return;
  const std::string reason = gpu::why_not_hopper_attention(shape, *rows);
  takes_documents_ = reason.empty();
  if (takes_documents_) {
    fused_ = gpu::make_hopper_attention(exec, shape, rope, *rows);
  } else if (rows->documents) {
    note_simple_attention(reason);
  } else {
    fused_ = gpu::make_cudnn_attention(exec, shape, rope, *rows);
  }
}
Attention::~Attention() = default;

/// Form for the call, or nullptr: the simple kernels'.
gpu::FusedAttention* Attention::fused(const AttentionMask& mask) const {
  if (!fused_ || takes_documents_ || mask.document_starts.dims() == 0) return fused_.get();
  note_simple_attention(kDocumentsReason);
  return nullptr;
}

void Attention::forward(const Exec& exec, const Tensor& q, const Tensor& k, const Tensor& v,
                        const Tensor& out, const Tensor& log_sums, const AttentionMask& mask) {
  if (on_cpu_) return on_cpu_->forward(q, k, v, out, log_sums, mask);
  if (auto* form = fused(mask)) return form->forward(exec, q, k, v, out, log_sums, mask);
  gpu::attention_forward(exec.stream, shape_, rope_, q, k, v, out, log_sums, mask);
}

void Attention::forward_again(const Exec& exec, const Tensor& q, const Tensor& k, const Tensor& v,
                              const Tensor& out, const Tensor& log_sums,
                              const AttentionMask& mask) {
  if (on_cpu_) return on_cpu_->forward(q, k, v, out, log_sums, mask);
  if (auto* form = fused(mask)) return form->forward_again(exec, q, k, v, out, log_sums, mask);
  gpu::attention_forward(exec.stream, shape_, rope_, q, k, v, out, log_sums, mask);
}

void Attention::backward(const Exec& exec, const Tensor& q, const Tensor& k, const Tensor& v,
                         const Tensor& out, const Tensor& log_sums, const Tensor& dout,
                         const Tensor& dq, const Tensor& dk, const Tensor& dv,
                         const AttentionMask& mask) {
  if (on_cpu_) return on_cpu_->backward(q, k, v, out, log_sums, dout, dq, dk, dv, mask);
  const gpu::AttentionGradients tensors{q, k, v, out, log_sums, dout, dq, dk, dv};
  if (auto* form = fused(mask)) return form->backward(exec, tensors, mask);
  gpu::attention_backward(exec.stream, shape_, rope_, tensors, mask);
}

}  // namespace tandem
