#include "kernels/cross_entropy.h"

#include "kernels/cpu/kernels.h"
#include "kernels/cuda/kernels.h"

namespace tandem {

void cross_entropy_max(const Exec& exec, const Tensor& logits, const Tensor& maxima) {
  if (exec.on_gpu()) return gpu::cross_entropy_max(exec.stream, logits, maxima);
  cpu::cross_entropy_max(logits, maxima);
}

void cross_entropy_sum(const Exec& exec, const Tensor& logits, const Tensor& targets, int64_t begin,
                       const Tensor& maxima, const Tensor& sums, const Tensor& picked) {
  if (exec.on_gpu())
    return gpu::cross_entropy_sum(exec.stream, logits, targets, begin, maxima, sums, picked);
  cpu::cross_entropy_sum(logits, targets, begin, maxima, sums, picked);
}

void cross_entropy_max_and_sum(const Exec& exec, const Tensor& logits, const Tensor& targets,
                               const Tensor& maxima, const Tensor& sums, const Tensor& picked) {
  if (exec.on_gpu()) {
    return gpu::cross_entropy_max_and_sum(exec.stream, logits, targets, maxima, sums, picked);
  }
  cpu::cross_entropy_max(logits, maxima);
  cpu::cross_entropy_sum(logits, targets, 0, maxima, sums, picked);
}

void cross_entropy_loss(const Exec& exec, const Tensor& targets, const Tensor& sums,
                        const Tensor& picked, const Tensor& total) {
  if (exec.on_gpu()) return gpu::cross_entropy_loss(exec.stream, targets, sums, picked, total);
  cpu::cross_entropy_loss(targets, sums, picked, total);
}

void cross_entropy_backward(const Exec& exec, const Tensor& logits, const Tensor& targets,
                            int64_t begin, const Tensor& maxima, const Tensor& sums, float scale,
                            const Tensor& dlogits) {
  if (exec.on_gpu())
    return gpu::cross_entropy_backward(exec.stream, logits, targets, begin, maxima, sums, scale,
                                       dlogits);
  cpu::cross_entropy_backward(logits, targets, begin, maxima, sums, scale, dlogits);
}

bool dlogits_replace_logits(const Exec& exec) {
  return exec.on_gpu();
}

}  // namespace tandem
