#include "kernels/attention/attention.h"

#include "kernels/attention/simple_attention.h"
#include "kernels/cpu/attention.h"
#include "kernels/cuda/cudnn/attention.h"
#include "kernels/cuda/kernels.h"
#include "tandem/error.h"

namespace tandem {
namespace {

/// Whether cuDNN, if it is there, runs this call.
bool fits_cudnn(const std::unique_ptr<gpu::FusedAttention>& fused, const AttentionMask& mask) {
  if (!fused) return false;
  if (mask.document_starts.dims() == 0) return true;
  note_simple_attention(kDocumentsReason);
  return false;
}

}  // namespace

Attention::Attention(const Exec& exec, const AttentionShape& shape, const RopeTable& rope,
                     const std::optional<AttentionRows>& rows)
    : shape_(shape),
      rope_(rope),
      on_cpu_(exec.on_gpu() ? nullptr : std::make_unique<cpu::Attention>(shape, rope)) {
  if (!exec.on_gpu()) return;
  gpu::check_attention(shape);
  if (rows) fused_ = gpu::make_cudnn_attention(exec, shape, rope, *rows);
}
Attention::~Attention() = default;

void Attention::forward(const Exec& exec, const Tensor& q, const Tensor& k, const Tensor& v,
                        const Tensor& out, const Tensor& log_sums, const AttentionMask& mask) {
  if (on_cpu_) return on_cpu_->forward(q, k, v, out, log_sums, mask);
  if (fits_cudnn(fused_, mask)) {
    return fused_->forward(exec, q, k, v, out, log_sums, mask.window);
  }
  gpu::attention_forward(exec.stream, shape_, rope_, q, k, v, out, log_sums, mask);
}

void Attention::forward_again(const Exec& exec, const Tensor& q, const Tensor& k, const Tensor& v,
                              const Tensor& out, const Tensor& log_sums,
                              const AttentionMask& mask) {
  if (on_cpu_) return on_cpu_->forward(q, k, v, out, log_sums, mask);
  if (fits_cudnn(fused_, mask)) {
    return fused_->forward_again(exec, q, k, v, out, log_sums, mask.window);
  }
  gpu::attention_forward(exec.stream, shape_, rope_, q, k, v, out, log_sums, mask);
}

void Attention::backward(const Exec& exec, const Tensor& q, const Tensor& k, const Tensor& v,
                         const Tensor& out, const Tensor& log_sums, const Tensor& dout,
                         const Tensor& dq, const Tensor& dk, const Tensor& dv,
                         const AttentionMask& mask) {
  if (on_cpu_) return on_cpu_->backward(q, k, v, out, log_sums, dout, dq, dk, dv, mask);
  const gpu::AttentionGradients tensors{q, k, v, out, log_sums, dout, dq, dk, dv};
  if (fits_cudnn(fused_, mask)) return fused_->backward(exec, tensors, mask.window);
  gpu::attention_backward(exec.stream, shape_, rope_, tensors, mask);
}

}  // namespace tandem
