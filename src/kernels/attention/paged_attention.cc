#include "kernels/attention/paged_attention.h"

#include "kernels/cpu/kernels.h"
#include "kernels/cuda/kernels.h"

namespace tandem {

PagedAttention::PagedAttention(const Exec& exec, const PagedShape& shape, const RopeTable& rope,
                               int64_t window)
    : shape_(shape),
      rope_(rope),
      window_(window),
      elements_(exec.on_gpu() ? gpu::paged_attention_partials(shape)
                              : cpu::paged_attention_scratch(shape)),
      scratch_(size_t(elements_) * sizeof(float), exec.device) {}

void PagedAttention::run(const Exec& exec, const PagedRows& rows, const Tensor& q, const Tensor& k,
                         const Tensor& v, const Tensor& keys, const Tensor& values,
                         const Tensor& out) {
  const PagedTensors tensors{q, k, v, keys, values, out, scratch_.view(DType::f32, {elements_})};
  if (exec.on_gpu()) {
    return gpu::paged_attention(exec.stream, shape_, rope_, window_, rows, tensors);
  }
  cpu::paged_attention(shape_, rope_, window_, rows, tensors);
}

}  // namespace tandem
