#include "kernels/sample.h"

#include "kernels/cuda/kernels.h"

namespace tandem {

int64_t sample_scratch(const Exec& exec, int64_t vocab) {
  return exec.on_gpu() ? gpu::sample_scratch(vocab) : 0;
}

void sample_rows(const Exec& exec, const Tensor& logits, const Tensor& options,
                 const Tensor& scratch, const Tensor& sampled) {
  gpu::sample_rows(exec.stream, logits, options, scratch, sampled);
}

}  // namespace tandem
