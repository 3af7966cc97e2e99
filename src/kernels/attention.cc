#include "kernels/attention.h"

#include "kernels/cpu/attention.h"
#include "kernels/cuda/kernels.h"

namespace tandem {

Attention::Attention(const Exec& exec, const AttentionShape& shape, const RopeTable& rope)
    : shape_(shape),
      rope_(rope),
      on_cpu_(exec.on_gpu() ? nullptr : std::make_unique<cpu::Attention>(shape, rope)) {
  if (exec.on_gpu()) gpu::check_attention(shape);
}
Attention::~Attention() = default;

void Attention::forward(const Exec& exec, const Tensor& q, const Tensor& k, const Tensor& v,
                        const Tensor& out, const Tensor& log_sums) {
  if (on_cpu_) return on_cpu_->forward(q, k, v, out, log_sums);
  gpu::attention_forward(exec.stream, shape_, rope_, q, k, v, out, log_sums);
}

void Attention::backward(const Exec& exec, const Tensor& q, const Tensor& k, const Tensor& v,
                         const Tensor& out, const Tensor& log_sums, const Tensor& dout,
                         const Tensor& dq, const Tensor& dk, const Tensor& dv) {
  if (on_cpu_) return on_cpu_->backward(q, k, v, out, log_sums, dout, dq, dk, dv);
  gpu::attention_backward(exec.stream, shape_, rope_, {q, k, v, out, log_sums, dout, dq, dk, dv});
}

}  // namespace tandem
